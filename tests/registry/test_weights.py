"""Weights: prepared into a layout and back exactly, written by one road that tells, seen by torch as their parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from toy_ops import Toy, installed, row, toy_linear

from glm5sdk.core.errors import ContractError
from glm5sdk.registry import Layout, Requires, Weight, load_weight, use
from glm5sdk.registry.weight import as_weight, from_parts, generation

pytestmark = pytest.mark.smoke

seen: list[tuple[int, ...]] = []


def pack(w: Weight) -> tuple[torch.Tensor, ...]:
    """Columns two by two: [O, N] -> [ceil(N / 2), O, 2], padded."""
    (plain,) = w.tensors
    padded = torch.nn.functional.pad(plain, (0, plain.shape[1] % 2))
    return (padded.view(plain.shape[0], padded.shape[1] // 2, 2).transpose(0, 1).contiguous(),)


def unpack(w: Weight) -> tuple[torch.Tensor, ...]:
    halves = w.tensors[0].shape[0]
    return (w.tensors[0].transpose(0, 1).reshape(w.shape[0], 2 * halves)[:, : w.shape[1]].contiguous(),)


PAIRS = Layout("toy.pairs", "plain", pack, unpack)


def kernel(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
    seen.append(tuple(w.shape))
    if w.dim() == 3:
        (w,) = unpack(Weight("plain", PAIRS.name, (y.shape[1], x.shape[1]), (w,)))
    y.copy_(x @ w.T)


@pytest.fixture(autouse=True)
def _toy() -> Iterator[None]:
    seen.clear()
    takes = Requires(dtypes=("f32", "bf16"), weights=("plain/plain", "plain/toy.pairs"))
    with installed(Toy(impls=(row("toy.a", kernel, "toy_linear", layout=PAIRS, requires=takes),))):
        yield


@pytest.mark.parametrize("shape", [(4, 6), (3, 5), (1, 1), (0, 4), (2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unprepare_undoes_prepare(shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = toy_linear.prepare(w)
    assert isinstance(packed, Weight)
    assert (packed.tag, packed.shape) == ("plain/toy.pairs", shape)
    back = toy_linear.unprepare(packed)
    assert isinstance(back, torch.Tensor)
    assert torch.equal(back, w)
    assert back.dtype == dtype


def test_a_prepared_weight_gives_the_bits_of_the_plain_one() -> None:
    x, w = torch.randn(3, 5), torch.randn(4, 5)
    plain = toy_linear(x, w)
    prepared = toy_linear(x, toy_linear.prepare(w))
    assert torch.equal(plain, prepared)
    assert seen == [(4, 5), (3, 4, 2)]


def test_preparing_follows_the_selection() -> None:
    w = torch.randn(4, 5)
    with use("reference"):
        assert toy_linear.prepare(w) is w
    assert toy_linear.prepare(w.double()) is not None
    assert toy_linear.prepare(w, dtype="f64") is w
    assert toy_linear.unprepare(w) is w


def test_a_layout_that_nobody_owns_is_named() -> None:
    alien = Weight("plain", "other.tiles", (4, 5), (torch.zeros(20),))
    with pytest.raises(ContractError, match="weight layout is 'other.tiles', needs one that an installed backend owns"):
        toy_linear.unprepare(alien)


def test_selection_sees_kind_and_layout() -> None:
    alien = Weight("plain", "other.tiles", (4, 5), (torch.zeros(20),))
    reasons = dict(toy_linear.explain(torch.zeros(2, 5), alien).choice.rows)
    assert [r for impl, r in reasons.items() if impl.name == "toy.a"] == [
        ("weight w is plain/other.tiles, needs plain/plain or plain/toy.pairs",)
    ]


def test_load_weight_writes_counts_and_rounds_once() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    value = torch.randn(2, 3, dtype=torch.float64)
    assert generation(parameter) == 0
    load_weight(parameter, value)
    assert torch.equal(parameter.detach(), value.to(torch.bfloat16))
    load_weight(parameter, torch.ones(3), index=1)
    assert torch.equal(parameter[1].detach(), torch.ones(3, dtype=torch.bfloat16))
    assert torch.equal(parameter[0].detach(), value[0].to(torch.bfloat16))
    assert generation(parameter) == 2
    assert parameter.requires_grad


def test_load_weight_refuses_other_shapes_and_writes_nothing() -> None:
    parameter = torch.zeros(2, 3)
    with pytest.raises(ContractError, match=r"load_weight: value is \(3, 2\), needs \(2, 3\)"):
        load_weight(parameter, torch.ones(3, 2))
    assert not parameter.any()
    assert generation(parameter) == 0


def test_a_weight_knows_itself() -> None:
    values, scales = torch.zeros(4, 5, dtype=torch.int8), torch.ones(4, requires_grad=True)
    w = Weight("w8a8", "plain", (4, 5), (values, scales))
    assert (w.tag, w.device, w.requires_grad) == ("w8a8/plain", torch.device("cpu"), True)
    assert w.map(lambda t: t.detach()).requires_grad is False
    assert as_weight(w) is w
    again: Any = from_parts(list(w.tensors), w.tag, w.shape)
    assert (again.kind, again.layout, again.shape) == ("w8a8", "plain", (4, 5))
    plain = torch.zeros(2, 2)
    assert from_parts([plain], "plain/plain", (2, 2)) is plain


def test_flattening_is_undone() -> None:
    x, w = torch.randn(3, 5), torch.randn(4, 5)
    packed = toy_linear.prepare(w)
    flat = toy_linear.contract.flatten(x, packed)
    assert flat[2:] == ("plain/toy.pairs", [4, 5])
    back = toy_linear.contract.unflatten(*flat)
    assert back[0] is x
    assert back[1].tensors[0] is packed.tensors[0]
    assert toy_linear.contract.unflatten(*toy_linear.contract.flatten(x, w))[1] is w
