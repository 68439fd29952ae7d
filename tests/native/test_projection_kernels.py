"""The fused projections have the bits of the ops they are made of: every level, dtype, format, thread count."""

from __future__ import annotations

import importlib

import pytest
import torch
from kernel_cases import FLOATS, bits_equal, draw

from glm5sdk import ops, use
from glm5sdk.core.errors import ContractError
from glm5sdk.registry import Weight
from glm5sdk.registry.formats import kv_row_bytes
from glm5sdk_cpu import _C

LEVELS = ("baseline", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
EPS = 1e-5
# t, hidden, q_rank, heads, nope, latent, rope: one row, blocks of rows, fewer heads than threads, odd sizes.
MLA = [
    (1, 96, 64, 9, 24, 40, 8),
    (7, 40, 20, 3, 12, 20, 6),
    (300, 33, 17, 2, 5, 3, 2),
    (5, 64, 48, 20, 16, 136, 4),
]
# t, hidden, q_rank, heads, dim, rope
INDEX = [(1, 96, 64, 9, 24, 8), (7, 40, 20, 3, 9, 6), (300, 33, 17, 2, 5, 4), (5, 70, 48, 33, 16, 16)]


def composed(name):
    """The decomposition that the op's own file gives."""
    return importlib.import_module(f"glm5sdk.ops.{name}").composed


def angles(rope, places=90):
    turns = torch.arange(places)[:, None] * torch.logspace(0, -4, rope // 2)
    return torch.cat([turns.cos(), turns.sin()], dim=-1).float()


def mla_inputs(t, n, q, h, nope, c, r, dtype):
    shapes = [(t, n), (q, n), (q,), (h * (nope + r), q), (c + r, n), (c,), (h, c, nope)]
    drawn = [draw(*s, seed=i, dtype=dtype, scale=0.3) for i, s in enumerate(shapes)]
    return (*drawn, torch.arange(t) * 7 % 90, angles(r))


def index_inputs(t, n, q, h, d, r, dtype):
    shapes = [(t, n), (t, q), (h * d, q), (d, n), (d,), (d,), (h, n)]
    drawn = [draw(*s, seed=i, dtype=dtype, scale=0.3) for i, s in enumerate(shapes)]
    return (*drawn, torch.arange(t) * 7 % 90, angles(r))


def slots_for(t):
    """Distinct slots out of order; every fifth row is not written."""
    slots = torch.randperm(2 * t + 3, generator=torch.Generator().manual_seed(0))[:t]
    return torch.where(torch.arange(t) % 5 == 4, -1, slots)


def same(got, want):
    assert all(bits_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", MLA)
def test_mla_project_has_the_bits_of_its_composition(native, level, dtype, interleaved, shape):
    inputs = mla_inputs(*shape, dtype)
    with use(f"cpu.{LEVELS[level]}"):
        want = composed("mla.mla_project")(*inputs, EPS, interleaved)
    for threads in (1, 2, 7):
        native.set_num_threads(threads)
        got = [torch.full_like(x, torch.nan) for x in want]
        native.mla_project(level, *inputs, EPS, interleaved, *got)
        same(got, want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", ["plain", "fp8_ds_mla"])
@pytest.mark.parametrize("shape", MLA)
def test_mla_preprocess_is_the_projection_and_the_write(native, level, dtype, format, shape):
    t, _, q_rank, h, _, c, r = shape
    inputs, slots = mla_inputs(*shape, dtype), slots_for(t)
    plain = format == "plain"
    width, kind = (c + r, dtype) if plain else (kv_row_bytes(c, r), torch.uint8)
    q, kv, q_latent = (torch.empty(*s, dtype=dtype) for s in ((t, h, c + r), (t, c + r), (t, q_rank)))
    native.mla_project(level, *inputs, EPS, True, q, kv, q_latent)
    want = torch.full((2 * t + 3, 1, width), 77, dtype=kind)
    native.concat_and_cache_mla(level, kv, want, slots, c, format)
    for threads in (1, 3):
        native.set_num_threads(threads)
        cache, got = torch.full_like(want, 77), (torch.empty_like(q), torch.empty_like(q_latent))
        native.mla_preprocess(level, *inputs, cache, slots, EPS, True, format, *got)
        same((cache, *got), (want, q, q_latent))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", INDEX)
def test_indexer_project_has_the_bits_of_its_composition(native, level, dtype, interleaved, shape):
    inputs = index_inputs(*shape, dtype)
    with use(f"cpu.{LEVELS[level]}"):
        want = composed("indexer.indexer_project")(*inputs, interleaved, 1e-6)
    for threads in (1, 2, 7):
        native.set_num_threads(threads)
        got = [torch.full_like(x, torch.nan) for x in want]
        native.indexer_project(level, *inputs, interleaved, 1e-6, *got)
        same(got, want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", ["plain", "fp8"])
@pytest.mark.parametrize("shape", INDEX)
def test_indexer_preprocess_is_the_projection_and_the_write(native, level, dtype, format, shape):
    t, _, _, h, d, _ = shape
    inputs, slots = index_inputs(*shape, dtype), slots_for(t)
    iq, ik, iw = torch.empty(t, h, d, dtype=dtype), torch.empty(t, d, dtype=dtype), torch.empty(t, h)
    native.indexer_project(level, *inputs, True, 1e-6, iq, ik, iw)
    size = 2 * t + 3
    want = (
        torch.full((1, size, d), 77, dtype=dtype) if format == "plain" else torch.full((1, size * (d + 4)), 77).byte()
    )
    native.cache_index_keys(level, ik, want, slots, format)
    for threads in (1, 3):
        native.set_num_threads(threads)
        cache, got = torch.full_like(want, 77), (torch.empty_like(iq), torch.empty_like(iw))
        native.indexer_preprocess(level, *inputs, cache, slots, True, 1e-6, format, *got)
        same((cache, *got), (want, iq, iw))


@pytest.mark.parametrize(
    ("positions", "slots", "message"),
    [
        ([0, 90, 1], [0, 1, 2], r"positions\[1\] is 90, needs 0 to 89"),
        ([0, 1, 2], [0, 9, 2], r"slots\[1\] is 9"),
        ([0, 1, 2], [4, -1, 4], "slot 4 is named twice"),
    ],
)
def test_bad_values_are_refused_before_anything_is_written(level, positions, slots, message):
    positions, slots = torch.tensor(positions), torch.tensor(slots)
    cache = torch.full((9, 1, 10), 7.0)
    inputs = mla_inputs(3, 8, 6, 2, 4, 8, 2, torch.float32)
    outs = (torch.full((3, 2, 10), 7.0), torch.full((3, 6), 7.0))
    with pytest.raises(ContractError, match=f"mla_preprocess: {message}"):
        _C.mla_preprocess(level, *inputs[:-2], positions, inputs[-1], cache, slots, EPS, True, "plain", *outs)
    assert all((x == 7).all() for x in (cache, *outs))
    inputs = index_inputs(3, 8, 6, 2, 10, 2, torch.float32)
    outs = (torch.full((3, 2, 10), 7.0), torch.full((3, 2), 7.0))
    with pytest.raises(ContractError, match=f"indexer_preprocess: {message}"):
        _C.indexer_preprocess(level, *inputs[:-2], positions, inputs[-1], cache, slots, True, 1e-6, "plain", *outs)
    assert all((x == 7).all() for x in (cache, *outs))


def test_quantised_weights_run_composed_and_explain_says_why():
    inputs = list(mla_inputs(2, 256, 128, 2, 4, 8, 2, torch.float32))
    codes = torch.randint(-127, 128, inputs[1].shape, generator=torch.Generator().manual_seed(0)).to(torch.int8)
    inputs[1] = Weight("w8a8", "plain", tuple(codes.shape), (codes, torch.full((len(codes),), 0.01)))
    explained = ops.mla_project.explain(*inputs)
    assert explained.choice.impl.name == "composed"
    assert "weight w_q_a is w8a8/plain, needs plain/plain" in str(explained)
    same(ops.mla_project(*inputs), composed("mla.mla_project")(*inputs, EPS, True))
