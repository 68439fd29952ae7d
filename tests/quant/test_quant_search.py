"""One matrix: nearest, searched and fed-forward rounding against plain loops in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glm5sdk.ops._weights import dequantize_weight, quantize_weight
from glm5sdk.quant.search import gram, quantise_matrix


def case(o: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(weight, inputs) with correlated inputs of unequal sizes, as real ones are."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(n, n, generator=g) / n**0.5 + 0.5 * torch.eye(n)
    x = torch.randn(4 * n, n, generator=g) @ mix * torch.exp(torch.randn(n, generator=g))
    w = torch.randn(o, n, generator=g) * torch.exp(0.5 * torch.randn(o, n, generator=g))
    return w, x


def output_error(w: Tensor, got: Tensor, x: Tensor) -> float:
    """||x (got - w)^T|| / ||x w^T|| in float64, activations not quantised."""
    return float((x.double() @ (got.double() - w.double()).T).norm() / (x.double() @ w.double().T).norm())


@pytest.mark.parametrize("kind", ["w8a8", "w4a8", "fp8"])
def test_nearest_is_the_ops_own_formula(kind: str) -> None:
    w, x = case(7, 150)
    for inputs in (gram(x), None):
        got, want = quantise_matrix(w, kind, "rtn", inputs), quantize_weight(w, kind)
        assert all(torch.equal(a, b) for a, b in zip(got.tensors, want.tensors, strict=True))


@pytest.mark.parametrize("kind", ["w8a8", "w4a8"])
@pytest.mark.parametrize("o, n", [(5, 128), (9, 150), (3, 20), (6, 260)])
def test_each_method_is_nearer_than_the_one_before(kind: str, o: int, n: int) -> None:
    w, x = case(o, n)
    errors = [
        output_error(w, dequantize_weight(quantise_matrix(w, kind, method, gram(x)), torch.float64), x)
        for method in ("rtn", "search", "gptq")
    ]
    assert errors[2] < errors[1] <= errors[0] * 1.02
    if kind == "w4a8":
        assert errors[2] < 0.8 * errors[0]


@pytest.mark.parametrize("kind", ["w8a8", "w4a8"])
def test_search_takes_the_best_clipping(kind: str) -> None:
    """A plain loop over the same clippings finds no better scale for any channel (w8a8) or group (w4a8, one here)."""
    w, x = case(4, 60)
    weight = quantise_matrix(w, kind, "search", gram(x))
    low, high, steps, step = (-127, 127, 11, 0.02) if kind == "w8a8" else (-8, 7, 21, 0.025)
    for row in range(4):
        chosen = dequantize_weight(weight, torch.float64)[row]
        least = float((x.double() @ (chosen - w[row].double())).square().sum())
        for i in range(steps):
            scale = (w[row].double().abs().max() * (1 - step * i)).float() / high
            q = (w[row].double() / scale.double()).round().clamp(low, high)
            error = float((x.double() @ (q * scale.double() - w[row].double())).square().sum())
            assert least <= error * (1 + 1e-9)


def test_feeding_errors_forward_is_the_textbook_algorithm() -> None:
    """Against a loop that inverts the remaining columns' matrix anew for each column; equal but for rounding ties."""
    w, x = case(3, 40)
    h = gram(x)
    weight = quantise_matrix(w, "w8a8", "gptq", h)
    h = h + 0.01 * h.diagonal().mean() * torch.eye(40, dtype=torch.float64)
    rest, q = w.double().clone(), torch.zeros(3, 40, dtype=torch.float64)
    scale = weight.tensors[1].double()
    for column in range(40):
        inverse = torch.linalg.inv(h[column:, column:])
        q[:, column] = (rest[:, column] / scale).round().clamp(-127, 127)
        error = (rest[:, column] - q[:, column] * scale) / inverse[0, 0]
        rest[:, column:] -= error[:, None] * inverse[0]
    assert (weight.tensors[0].double() == q).double().mean() > 0.99


@pytest.mark.parametrize("method", ["search", "gptq"])
def test_inputs_that_calibration_never_saw_change_nothing(method: str) -> None:
    w, _ = case(4, 130)
    for inputs in (None, torch.zeros(130, 130, dtype=torch.float64)):
        got, want = quantise_matrix(w, "w4a8", method, inputs), quantize_weight(w, "w4a8")
        assert all(torch.equal(a, b) for a, b in zip(got.tensors, want.tensors, strict=True))


@pytest.mark.parametrize("kind", ["w8a8", "w4a8"])
def test_few_tokens_and_zero_columns_give_finite_weights(kind: str) -> None:
    w, x = case(4, 130)
    x = x[:3].clone()
    x[:, 7] = 0
    w[2] = 0
    back = dequantize_weight(quantise_matrix(w, kind, "gptq", gram(x)), torch.float64)
    assert back.isfinite().all()
    assert (back - w).abs().max() < 2 * w.abs().max()
