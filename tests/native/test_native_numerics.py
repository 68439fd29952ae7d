"""Kernels against float64, rows against their batch, and the levels' symbols against each other."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from kernel_cases import BF16_PRODUCTS

from glm5sdk_cpu import _C

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
UNIT = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
WIDTHS = [1, 3, 15, 16, 17, 64, 67, 257]


def draw(*shape, dtype, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got, want, dtype, scale=None):
    """Within a few roundings of the result's own size (or of `scale`)."""
    size = want.abs() if scale is None else scale
    assert ((got.double() - want).abs() <= 4 * UNIT[dtype] * size + 1e-7).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", WIDTHS)
def test_norms_and_add_agree_with_float64(level, dtype, n):
    x, residual = draw(5, n, dtype=dtype, seed=1), draw(5, n, dtype=dtype, seed=2)
    weight, bias = draw(n, dtype=dtype, seed=3), draw(n, dtype=dtype, seed=4)
    y, total = torch.empty_like(x), torch.empty_like(x)

    def rms(v):
        return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-5) * weight.double()

    _C.rms_norm(level, x, weight, 1e-5, y)
    close(y, rms(x.double()), dtype)
    _C.add(level, x, residual, total)
    assert torch.equal(total, x + residual)
    fused, fused_total = torch.empty_like(x), torch.empty_like(x)
    _C.fused_add_rms_norm(level, x, residual, weight, 1e-5, fused, fused_total)
    assert torch.equal(fused_total, total)
    _C.rms_norm(level, total, weight, 1e-5, y)
    assert torch.equal(fused, y)
    _C.layer_norm(level, x, weight, bias, 1e-5, y)
    want = torch.nn.functional.layer_norm(x.double(), (n,), weight.double(), bias.double(), 1e-5)
    scale = (want - bias.double()).abs() + bias.double().abs() + weight.double().abs()
    close(y, want, dtype, scale)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("t,o,k", [(1, 1, 1), (3, 5, 7), (7, 13, 33), (9, 97, 129), (70, 50, 64)])
@pytest.mark.parametrize("wide_out", [False, True])
def test_linear_agrees_with_float64(level, dtype, t, o, k, wide_out):
    x, w, bias = draw(t, k, dtype=dtype, seed=1), draw(o, k, dtype=dtype, seed=2), draw(o, dtype=dtype, seed=3)
    out = torch.float32 if wide_out else dtype
    y = torch.empty(t, o, dtype=out)
    product = x.double() @ w.double().t()
    for shift in (bias, None):
        _C.linear(level, x, w, shift, y)
        want = product if shift is None else product + shift.double()
        # K roundings in f32, each of a partial sum, and one rounding to the output.
        partial = x.double().abs() @ w.double().abs().t() + bias.double().abs()
        assert ((y.double() - want).abs() <= 2.0**-21 * partial + UNIT[out] * want.abs() + 1e-7).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("k", [1, 31, 96, 200])
def test_rows_do_not_know_their_batch(level, dtype, k):
    t, o = 41, 53
    x, w = draw(t, k, dtype=dtype, seed=1), draw(o, k, dtype=dtype, seed=2)
    y, normed = torch.empty(t, o, dtype=dtype), torch.empty_like(x)
    _C.linear(level, x, w, None, y)
    _C.rms_norm(level, x, x[0].clone(), 1e-5, normed)
    for a, b in [(0, 1), (1, 3), (5, 8), (3, 41), (17, 27), (40, 41)]:
        part = torch.empty(b - a, o, dtype=dtype)
        _C.linear(level, x[a:b], w, None, part)
        assert torch.equal(part, y[a:b])
        part = torch.empty(b - a, k, dtype=dtype)
        _C.rms_norm(level, x[a:b], x[0].clone(), 1e-5, part)
        assert torch.equal(part, normed[a:b])
        # A column does not know its neighbours either: tensor parallelism splits outputs.
        part = torch.empty(t, b - a, dtype=dtype)
        _C.linear(level, x, w[a:b], None, part)
        assert torch.equal(part, y[:, a:b].contiguous())


def test_rows_and_outputs_end_where_they_end(level):
    """NaN all around: reading one element too many shows in the result, writing one too many in the margin."""
    for dtype in FLOATS:
        for k in (1, 5, 16, 19):
            x = torch.full((3, k + 2), float("nan"), dtype=dtype).flatten()
            inner = x[1 : 1 + k].view(1, k)
            inner.copy_(draw(1, k, dtype=dtype, seed=k))
            y = torch.full((k + 2,), 7.0, dtype=dtype)
            _C.rms_norm(level, inner, torch.ones(k, dtype=dtype), 1e-5, y[1 : 1 + k].view(1, k))
            assert y[0] == 7
            assert y[-1] == 7
            assert not y.isnan().any()
            out = torch.full((6,), 7.0, dtype=dtype)
            _C.linear(level, inner, torch.ones(4, k, dtype=dtype), None, out[1:5].view(1, 4))
            assert out[0] == 7
            assert out[-1] == 7
            assert not out.isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_rounding_is_torch_s_on_every_value(level, dtype):
    """Widening all 65536 patterns and rounding midpoints, overflow, denormals and NaN, through linear with K = 1."""
    patterns = torch.arange(-32768, 32768, dtype=torch.int16).view(dtype)
    wide = torch.empty(65536, 1)
    _C.linear(level, patterns.view(-1, 1), torch.ones(1, 1, dtype=dtype), None, wide)
    want = patterns.float() + 0.0
    if dtype == torch.bfloat16 and level >= BF16_PRODUCTS:  # those instructions take denormals for zero
        want = want.where(want.isnan() | (want.abs() >= 2.0**-126), 0.0)
    assert torch.equal(wide.flatten().nan_to_num(123.5), want.nan_to_num(123.5))
    assert torch.equal(wide.flatten().isnan(), want.isnan())
    # a + b is exact in f32 often enough to land on ties; torch rounds the same f32 sum.
    x, y = patterns, patterns.flip(0).roll(12345)
    z = torch.empty_like(x)
    _C.add(level, x, y, z)
    want = (x.float() + y.float()).to(dtype)
    assert torch.equal(z.nan_to_num(0.0), want.nan_to_num(0.0))
    assert torch.equal(z.isnan(), want.isnan())


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_no_function_is_shared_between_instruction_levels():
    """A weak symbol outside its level's namespace could be linked from a level that the machine lacks."""
    objects = {
        name: sorted(Path(__file__).parents[2].glob(f"build/*/csrc/CMakeFiles/glm5_cpu_{name}.dir/**/*.o"))
        for name in ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
    }
    if not any(objects.values()):
        pytest.skip("the object files are not kept here")
    for name, files in objects.items():
        for file in files:
            lines = subprocess.check_output(["nm", "-C", str(file)], text=True).splitlines()
            shared = [line for line in lines if line[17:18] in "Wu" and f"glm5::{name}::" not in line]
            assert not shared, f"{file.name}: {shared}"
