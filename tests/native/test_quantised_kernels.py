"""Kernels on quantised weights against the reference's formulas, fused against composed, rows against their batch."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import FLOATS, UNIT, bits_equal, draw
from moe_cases import gated, permute, routes, unpermute
from torch import Tensor

from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.ops._weights import experts as each_expert
from glm5sdk.ops._weights import project, quantize_weight
from glm5sdk.registry import Weight, use
from glm5sdk_cpu import _C

KINDS = ("w8a8", "w4a8", "fp8")
EXACT = ("w8a8", "w4a8")  # integer sums: the reference's bits on every level
ROWS = (0, 1, 2, 5, 16, 17, 33)
INT8, FP8 = torch.int8, torch.float8_e4m3fn


def weight(*shape: int, kind: str, seed: int) -> Weight:
    return quantize_weight(draw(*shape, seed=seed, scale=shape[-1] ** -0.5), kind)


def linear(level: int, x: Tensor, w: Weight, bias: Tensor | None = None, out: torch.dtype | None = None) -> Tensor:
    y = torch.full((x.shape[0], w.shape[0]), math.nan, dtype=out or x.dtype)
    _C.linear(level, x, *w.tensors, bias, y)
    return y


def grouped(level: int, x: Tensor, w: Weight, offsets: Tensor) -> Tensor:
    y = torch.full((x.shape[0], w.shape[1]), math.nan, dtype=x.dtype)
    _C.grouped_gemm(level, x, *w.tensors, offsets, y)
    return y


def experts(level: int, x: Tensor, ids: Tensor, weights: Tensor, w: Weight, down: Weight, limit=None) -> Tensor:
    y = torch.full_like(x, math.nan)
    _C.moe_experts(level, x, ids, weights, *w.tensors, *down.tensors, limit, y)
    return y


@pytest.mark.parametrize("n", [1, 7, 63, 64, 65, 127, 128, 129, 300])
@pytest.mark.parametrize("kind", EXACT)
def test_integer_products_have_the_reference_s_bits(level, kind, n):
    for o in (1, 5, 17, 64, 65):
        w, bias = weight(o, n, kind=kind, seed=o), draw(o, seed=3)
        if kind == "w8a8":
            w.tensors[0][0, 0] = -128  # quantising never gives it, but a checkpoint may
        for t in ROWS:
            x = draw(t, n, seed=t)
            assert bits_equal(linear(level, x, w), project(x, w))
            assert bits_equal(linear(level, x, w, bias), torch.add(project(x, w), bias, out=torch.empty(t, o)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", EXACT)
def test_activations_and_outputs_of_every_dtype(level, kind, dtype):
    w = weight(70, 200, kind=kind, seed=1)
    for t in (1, 3, 40):
        x, bias = draw(t, 200, seed=t, dtype=dtype), draw(70, seed=2, dtype=dtype)
        assert bits_equal(linear(level, x, w, bias), (project(x, w) + bias.float()).to(dtype))
        assert bits_equal(linear(level, x, w, out=torch.float32), project(x, w))


@pytest.mark.parametrize("n", [1, 7, 63, 127, 128, 129, 300])
def test_float8_products_agree_with_float64(level, n):
    for o in (1, 5, 17, 129):
        w = weight(o, n, kind="fp8", seed=o)
        for t in ROWS:
            x = draw(t, n, seed=t, dtype=torch.bfloat16)
            want = project(x, w)
            q, scale = ops.quantize_per_group(x)
            size = ops.dequantize(q, scale, torch.float32).double().abs()
            values, blocks = w.tensors
            scales = blocks.double().repeat_interleave(128, 0)[:o].repeat_interleave(128, 1)[:, :n]
            wide = values.double().abs() * scales
            assert ((linear(level, x, w, out=torch.float32) - want).abs() <= 2.0**-19 * size @ wide.T).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_know_their_batch(native, level, kind):
    w = weight(77, 300, kind=kind, seed=1)
    x = draw(300, 300, seed=2, dtype=torch.bfloat16)
    native.set_num_threads(1)
    y = linear(level, x, w)
    native.set_num_threads(3)
    assert bits_equal(linear(level, x, w), y)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(4))
    for rows in (slice(0, 1), slice(3, 5), slice(7, 12), slice(250, 300), slice(10, 27), order):
        assert bits_equal(linear(level, x[rows], w), y[rows])


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_row_stays_in_its_row(level, kind):
    w = weight(40, 130, kind=kind, seed=1)
    x = draw(20, 130, seed=2)
    clean = linear(level, x, w)
    x[3, 129], x[5, 0] = math.nan, math.inf
    y = linear(level, x, w)
    others = [i for i in range(20) if i not in (3, 5)]
    assert bits_equal(y[others], clean[others])
    assert not y[[3, 5]].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_rows_are_those_of_linear(level, kind):
    n, o, e = 140, 50, 5
    w = weight(e, o, n, kind=kind, seed=1)
    offsets = torch.tensor([0, 1, 1, 4, 30, 38], dtype=torch.int32)
    x = draw(40, n, seed=2, dtype=torch.bfloat16)
    y = grouped(level, x, w, offsets)
    for i, expert in enumerate(each_expert(w)):
        rows = slice(int(offsets[i]), int(offsets[i + 1]))
        assert bits_equal(y[rows], linear(level, x[rows], expert))
    assert (y[38:] == 0).all()


@pytest.mark.parametrize("kinds", [(k, k) for k in KINDS] + [("w4a8", "w8a8"), ("w8a8", "fp8")])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_fused_experts_have_the_bits_of_the_ops_they_fuse(native, level, kinds, limit):
    t, a, e, n, i = 90, 3, 7, 72, 40
    for dtype in FLOATS:
        x, ids, weights = draw(t, n, seed=1, dtype=dtype), routes(t, a, e, seed=3), draw(t, a, seed=2)
        up, down = weight(e, 2 * i, n, kind=kinds[0], seed=5), weight(e, n, i, kind=kinds[1], seed=6)
        rows, row_ids, offsets = permute(level, x, ids, e)
        hidden = gated(level, grouped(level, rows, up, offsets), limit)
        want = unpermute(level, grouped(level, hidden, down, offsets), row_ids, weights)
        native.set_num_threads(1)
        assert bits_equal(experts(level, x, ids, weights, up, down, limit), want)
        native.set_num_threads(3)
        assert bits_equal(experts(level, x, ids, weights, up, down, limit), want)
        for part in (slice(0, 1), slice(40, 47)):
            assert bits_equal(experts(level, x[part], ids[part], weights[part], up, down, limit), want[part])


@pytest.mark.parametrize("kind", KINDS)
def test_fused_experts_agree_with_the_reference(level, kind):
    t, a, e, n, i = 20, 3, 5, 130, 60
    x, ids, weights = draw(t, n, seed=1), routes(t, a, e, seed=3), draw(t, a, seed=2)
    up, down = weight(e, 2 * i, n, kind=kind, seed=5), weight(e, n, i, kind=kind, seed=6)
    with use("reference"):
        want = ops.moe_experts(x, ids, weights, up, down)
    y = experts(level, x, ids, weights, up, down)
    # A hidden value at a tie may be quantised the other way: one step of one element of the second product.
    assert ((y - want).abs() <= (0.08 if kind == "fp8" else 1 / 127) * want.abs().max()).all()
    assert (y - want).abs().mean() <= 0.002 * want.abs().mean()


@pytest.mark.parametrize("tokens,active,inner", [(0, 2, 5), (2, 0, 5), (6, 1, 0)])
def test_empty_axes(level, tokens, active, inner):
    x, ids = torch.ones(tokens, 4), torch.zeros(tokens, active, dtype=torch.int32)
    up = Weight("w8a8", "plain", (1, 2 * inner, 4), (torch.ones(1, 2 * inner, 4, dtype=INT8), torch.ones(1, 2 * inner)))
    down = Weight("w8a8", "plain", (1, 4, inner), (torch.ones(1, 4, inner, dtype=INT8), torch.ones(1, 4)))
    assert bits_equal(experts(level, x, ids, torch.ones(tokens, active), up, down), torch.zeros(tokens, 4))


@pytest.mark.parametrize("values,scales,sentence", [
    (torch.zeros(5, 8, dtype=INT8), torch.ones(4), "the scales of w have"),
    (torch.zeros(5, 7, dtype=INT8), torch.ones(5), "the values of w have"),
    (torch.zeros(5, 8, dtype=torch.uint8), torch.ones(5, 1), "the values of w have"),
    (torch.zeros(5, 4, dtype=torch.uint8), torch.ones(5, 2), "the scales of w have"),
    (torch.zeros(5, 8).to(FP8), torch.ones(5, 1), "the scales of w have"),
    (torch.zeros(5, 8), torch.ones(5), "the values of w are f32"),
])  # fmt: skip
def test_a_weight_of_other_sizes_is_refused_before_anything_is_written(level, values, scales, sentence):
    y = torch.full((2, 5), 7.0)
    with pytest.raises(ContractError, match=sentence):
        _C.linear(level, torch.ones(2, 8), values, scales, None, y)
    assert (y == 7).all()


def test_plain_and_quantised_weights_in_one_call_are_refused_by_the_kernel_with_a_reason():
    x, ids, weights = draw(3, 16, seed=1), routes(3, 2, 4, seed=2), draw(3, 2, seed=3)
    up, down = weight(4, 16, 16, kind="w8a8", seed=4), draw(4, 16, 8, seed=5)
    rows = ops.moe_experts.explain(x, ids, weights, up, down).choice.rows
    reasons = [r for impl, r in rows if impl.backend == "cpu"]
    assert reasons
    assert all("needs all plain or all quantised" in r[0] for r in reasons)
    assert ops.moe_experts(x, ids, weights, up, down).isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 15, 127, 128, 129, 300])
def test_quantised_activations_have_the_reference_s_bits(level, dtype, n):
    x = draw(9, n, seed=1, dtype=dtype, scale=3.0)
    x[1] = 0
    x[2, 0] = 1000
    for to in (INT8, FP8):
        for op, groups in ((ops.quantize_per_token, 1), (ops.quantize_per_group, -(-n // 128))):
            q, scale = torch.empty(9, n, dtype=to), torch.empty(9, groups)
            getattr(_C, op.name)(level, x, q, scale)
            with use("reference"):
                want, want_scale = op(x, to)
                back = ops.dequantize(q, scale, dtype)
            assert bits_equal(q, want)
            assert bits_equal(scale, want_scale)
            y = torch.empty(9, n, dtype=dtype)
            _C.dequantize(level, q, scale, y)
            assert bits_equal(y, back)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_nan_makes_its_group_s_scale_nan(level, dtype):
    x = torch.ones(2, 200, dtype=dtype)
    x[0, 150] = math.nan
    q, scale = torch.empty(2, 200, dtype=INT8), torch.empty(2, 2)
    _C.quantize_per_group(level, x, q, scale)
    assert scale.isnan().tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 2, 8, 16, 128, 1024])
def test_hadamard_agrees_with_the_matrix(level, dtype, n):
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    x = draw(5, n, seed=1, dtype=dtype)
    y = torch.empty_like(x)
    _C.hadamard(level, x, y)
    want = x.double() @ matrix * n**-0.5
    assert ((y.double() - want).abs() <= UNIT[dtype] * want.abs() + 2.0**-19).all()
