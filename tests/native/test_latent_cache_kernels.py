"""Rope, the per-head value linear and the cache writers, each against its formula and against its own batch."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import FLOATS, bits_equal, draw, within

from glm5sdk.core.errors import ContractError
from glm5sdk.registry.formats import kv_row_bytes
from glm5sdk_cpu import _C

FP8 = torch.float8_e4m3fn


def table(places, r):
    angles = torch.arange(places)[:, None] * torch.logspace(0, -4, r // 2)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


def rope(level, x, positions, cos_sin, interleaved):
    y = torch.full_like(x, 7.0)
    _C.rope(level, x, positions, cos_sin, interleaved, y)
    return y


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("r", [2, 6, 20, 32, 64, 66])
def test_rope_is_the_formula_bit_for_bit(level, dtype, interleaved, r):
    x, positions = draw(9, 3, r, seed=1, dtype=dtype), torch.tensor([0, 5, 5, 99, 1, 2, 3, 4, 50])
    cos, sin = table(100, r)[positions][:, None].split(r // 2, dim=-1)
    wide = x.float()
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else (wide[..., : r // 2], wide[..., r // 2 :])
    left, right = a * cos - b * sin, b * cos + a * sin
    want = torch.stack([left, right], -1).flatten(-2) if interleaved else torch.cat([left, right], -1)
    got = rope(level, x, positions, table(100, r), interleaved)
    assert bits_equal(got, want.to(dtype))
    assert bits_equal(rope(level, x[3:4].clone(), positions[3:4].clone(), table(100, r), interleaved), got[3:4])


def test_rope_refuses_before_it_writes(level):
    x, y = torch.ones(2, 1, 4), torch.full((2, 1, 4), 7.0)
    for bad in (-1, 3):
        with pytest.raises(ContractError, match=rf"rope: positions\[1\] is {bad}, needs 0 to 2"):
            _C.rope(level, x, torch.tensor([0, bad]), table(3, 4), True, y)
    with pytest.raises(ContractError, match="rope: R is 3, needs an even size"):
        _C.rope(level, torch.ones(2, 1, 3), torch.tensor([0, 1]), torch.ones(3, 3), True, torch.ones(2, 1, 3))
    assert (y == 7).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("t,h,c,dv", [(1, 3, 40, 12), (7, 2, 129, 33), (70, 1, 64, 50), (3, 5, 1, 1)])
def test_values_are_expanded_head_by_head(native, level, dtype, t, h, c, dv):
    out, w = draw(t, h, c, seed=1, dtype=dtype), draw(h, dv, c, seed=2, dtype=dtype)
    y = torch.empty(t, h * dv, dtype=dtype)
    native.mla_expand_values(level, out, w, y)
    want = torch.einsum("thc,hdc->thd", out.double(), w.double()).reshape(t, h * dv)
    within(y, want, dtype, torch.einsum("thc,hdc->thd", out.double().abs(), w.double().abs()).reshape(t, h * dv))
    for head in range(h):
        part = torch.empty(t, dv, dtype=dtype)
        native.linear(level, out[:, head].contiguous(), w[head].clone(), None, part)
        assert bits_equal(part, y[:, head * dv : (head + 1) * dv])
    for threads, rows in ((1, slice(None)), (2, slice(t // 2, t))):
        native.set_num_threads(threads)
        part = torch.empty(len(y[rows]), h * dv, dtype=dtype)
        native.mla_expand_values(level, out[rows].clone(), w, part)
        assert bits_equal(part, y[rows])


def quantised(x):
    """Codes and scale [n, 1] of rows x f32 [n, d] that share one scale each."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
    return (x / scale).clamp(-448, 448).to(FP8).view(torch.uint8), scale


def awkward_rows(n, d, dtype):
    """Zeros, tiny and huge rows, ties between codes, and ordinary rows."""
    x = draw(n, d, seed=d, dtype=dtype)
    x[0] = 0
    x[1] *= 1e-5
    x[2] *= 3e4
    x[3] = (torch.arange(d) % 57 * 8 - 224).to(dtype)
    x[3, 0] = 448
    return x


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("c,r,s", [(512, 64, 64), (40, 20, 5), (130, 6, 1), (3, 2, 7)])
@pytest.mark.parametrize("format", ["plain", "fp8_ds_mla"])
def test_kv_rows_land_in_their_slots(level, dtype, c, r, s, format):
    rows, pages = awkward_rows(9, c + r, dtype), 30 // s + 1
    slots = torch.tensor([3, -1, 0, 29, 17, -1, 5, 4, 8])
    width = c + r if format == "plain" else kv_row_bytes(c, r)
    cache = torch.full((pages, s, width), 7, dtype=dtype if format == "plain" else torch.uint8)
    want = cache.clone().view(-1, width)
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if slot >= 0 and format == "plain":
            want[slot] = row
        elif slot >= 0:
            groups = [quantised(part[None]) for part in row[:c].float().split(128)]
            scales = torch.cat([scale[0] for _, scale in groups]).view(torch.uint8)
            want[slot] = torch.cat([*(q[0] for q, _ in groups), scales, row[c:].bfloat16().view(torch.uint8)])
    _C.concat_and_cache_mla(level, rows, cache, slots, c, format)
    assert bits_equal(cache.view(-1, width), want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("d,s", [(128, 64), (12, 5), (33, 1)])
@pytest.mark.parametrize("format", ["plain", "fp8"])
def test_index_keys_land_in_their_slots(level, dtype, d, s, format):
    rows, pages = awkward_rows(9, d, dtype), 30 // s + 1
    slots = torch.tensor([3, -1, 0, 29, 17, -1, 5, 4, 8])
    if format == "plain":
        cache = torch.full((pages, s, d), 7, dtype=dtype)
    else:
        cache = torch.full((pages, s * (d + 4)), 7, dtype=torch.uint8)
    want = cache.clone()
    for row, slot in zip(rows, slots.tolist(), strict=True):
        page, offset = divmod(slot, s)
        if slot >= 0 and format == "plain":
            want[page, offset] = row
        elif slot >= 0:
            codes, scale = quantised(row[None].float())
            want[page, offset * d : (offset + 1) * d] = codes[0]
            want[page, s * d + 4 * offset : s * d + 4 * offset + 4] = scale[0].view(torch.uint8)
    _C.cache_index_keys(level, rows, cache, slots, format)
    assert bits_equal(cache, want)


def test_every_code_and_every_tie_between_codes(level):
    """A row whose scale is 1 holds every code, its midpoint to the next and the neighbours of that midpoint."""
    codes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    middle = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, middle, middle.nextafter(codes[1:]), middle.nextafter(codes[:-1])])
    values = torch.cat([values, -values])[None].contiguous()
    cache = torch.zeros(1, values.shape[1] + 4, dtype=torch.uint8)
    _C.cache_index_keys(level, values, cache, torch.tensor([0]), "fp8")
    assert cache[0, -4:].clone().view(torch.float32).item() == 1
    assert bits_equal(cache[:, :-4], values.to(FP8).view(torch.uint8))


def test_a_nan_stays_one_and_keeps_to_its_group(level):
    rows = torch.ones(1, 258)
    rows[0, 5] = torch.nan
    cache = torch.zeros(1, 1, kv_row_bytes(256, 2), dtype=torch.uint8)
    _C.concat_and_cache_mla(level, rows, cache, torch.tensor([0]), 256, "fp8_ds_mla")
    assert (cache[0, 0, :128] & 0x7F == 0x7F).all() and (cache[0, 0, 128:256] == 0x7E).all()


def test_writers_refuse_before_they_write(level):
    cache = torch.full((2, 3, 4), 7.0)
    for bad in (-2, 6):
        for write, rest in ((_C.concat_and_cache_mla, (3, "plain")), (_C.cache_index_keys, ("plain",))):
            with pytest.raises(ContractError, match=rf"slots\[1\] is {bad}, needs -1 to 5"):
                write(level, torch.ones(2, 4), cache, torch.tensor([0, bad]), *rest)
    with pytest.raises(ContractError, match='cache_index_keys: format is "int3", needs "plain" or "fp8"'):
        _C.cache_index_keys(level, torch.ones(1, 4), cache, torch.tensor([0]), "int3")
    assert (cache == 7).all()
    _C.cache_index_keys(level, torch.ones(0, 4), cache, torch.zeros(0, dtype=torch.int64), "plain")
