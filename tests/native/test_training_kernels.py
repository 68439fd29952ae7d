"""Gradient kernels of norms and the gated activation: float64 formulas, and the same bits for any number of threads."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import FLOATS, UNIT, bits_equal, draw

EPS = 1e-5
SHAPES = [(1, 1), (5, 63), (130, 65), (200, 192), (3, 1030), (0, 7)]


def close(got, want, dtype, terms=None):
    """One rounding of each element plus float32 noise of the size of the tensor, or of the terms that cancel in it."""
    terms = want if terms is None else terms
    size = terms.abs().max() if terms.numel() else 0.0
    error = (got.double() - want).abs()
    assert (error <= 2 * UNIT[dtype] * want.abs() + 2e-6 * size + 1e-30).all(), f"off by {error.max()}"


def norm_gradients(grad_y, x, weight):
    """dx, dweight and dx's first term of rms_norm in float64, where x is what the norm reads."""
    g, x, w = grad_y.double(), x.double(), weight.double()
    r = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    n = x * r
    rounded = n.to(grad_y.dtype).double()  # the factor of the weight is rounded before the product
    return r * (g * w - n * (g * w * n).mean(-1, keepdim=True)), (g * rounded).sum(0), r * g * w


def noise(grad_y):
    """A rounded factor may fall to either side of a boundary: one unit of each term."""
    return 2 * UNIT[grad_y.dtype] * (grad_y.double().abs() * 4).sum(0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("t", "n"), SHAPES)
def test_norm_gradients_are_those_of_float64(native, level, dtype, t, n):
    grad, x, weight = (draw(*s, seed=i, dtype=dtype) for i, s in enumerate([(t, n), (t, n), (n,)]))
    residual, also = draw(t, n, seed=3, dtype=dtype), draw(t, n, seed=4, dtype=dtype)
    dx, dw = torch.full_like(x, torch.nan), torch.full_like(weight, torch.nan)
    native.rms_norm_bwd(level, grad, x, weight, EPS, dx, dw)
    want = norm_gradients(grad, x, weight)
    close(dx, want[0], dtype, want[2])
    assert ((dw.double() - want[1]).abs() <= noise(grad) + 2 * UNIT[dtype] * want[1].abs() + 1e-30).all()

    outs = [torch.full_like(x, torch.nan), torch.full_like(x, torch.nan), torch.full_like(weight, torch.nan)]
    native.fused_add_rms_norm_bwd(level, grad, also, x, residual, weight, EPS, *outs)
    total = (x.float() + residual.float()).to(dtype)
    want = norm_gradients(grad, total, weight)
    close(outs[0], want[0] + also.double(), dtype, want[2].abs() + also.double().abs())
    assert bits_equal(outs[0], outs[1])
    native.rms_norm_bwd(level, grad, total, weight, EPS, dx, dw)
    assert bits_equal(outs[2], dw)  # one formula, fused or not


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 3, 16, 63, 130])
@pytest.mark.parametrize("limit", [None, 0.5, 10.0])
def test_gated_gradient_is_that_of_float64(native, level, dtype, n, limit):
    grad, x = draw(9, n, seed=1, dtype=dtype), draw(9, 2 * n, seed=2, dtype=dtype, scale=3.0)
    wide = x.double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    (torch.nn.functional.silu(gate) * up * grad.double()).sum().backward()
    got = torch.full_like(x, torch.nan)
    native.silu_and_mul_bwd(level, grad, x, limit, got)
    close(got, wide.grad, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_thread_count_never_changes_a_bit(native, level, dtype):
    t, n = 333, 770
    grad, x, weight = (draw(*s, seed=i, dtype=dtype) for i, s in enumerate([(t, n), (t, n), (n,)]))
    found = []
    for threads in (1, 2, 3, 7):
        native.set_num_threads(threads)
        outs = [torch.empty_like(x), torch.empty_like(x), torch.empty_like(weight), torch.empty_like(x)]
        native.fused_add_rms_norm_bwd(level, grad, grad, x, x, weight, EPS, *outs[:3])
        native.silu_and_mul_bwd(level, grad[:, : n // 2].contiguous(), x, None, outs[3])
        found.append(outs)
    for other in found[1:]:
        assert all(bits_equal(a, b) for a, b in zip(found[0], other, strict=True))
