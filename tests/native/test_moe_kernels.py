"""Sorting, grouped products and the fused experts: against loops, against each other, against their batch."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import FLOATS, UNIT, bits_equal, draw
from moe_cases import composed, experts, grouped, permute, routes, unpermute, weights_of

from glm5sdk.core.errors import ContractError
from glm5sdk_cpu import _C

SHAPES = [  # T, A, E, N, I
    (1, 1, 1, 1, 1),
    (1, 2, 4, 40, 20),
    (3, 2, 3, 65, 63),
    (16, 8, 9, 20, 12),
    (63, 3, 5, 129, 64),
    (300, 2, 8, 48, 33),
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("t,a,e,n", [(1, 1, 1, 1), (7, 3, 5, 20), (65, 8, 9, 3), (40, 2, 300, 17)])
def test_permute_sorts_by_expert_then_slot(level, dtype, t, a, e, n):
    x, ids = draw(t, n, dtype=dtype, seed=1), routes(t, a, e, seed=2, shuffle=True)
    rows, row_ids, offsets = permute(level, x, ids, e)
    flat = ids.flatten().tolist()
    slots = sorted((s for s in range(t * a) if flat[s] >= 0), key=lambda s: (flat[s], s))
    assert row_ids.tolist() == slots + [-1] * (t * a - len(slots))
    assert offsets.tolist() == [sum(0 <= f < b for f in flat) for b in range(e + 1)]
    assert bits_equal(rows[: len(slots)], x[torch.tensor(slots, dtype=torch.int64) // a])
    assert bits_equal(rows[len(slots) :], torch.zeros(t * a - len(slots), n, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_unpermute_adds_in_the_order_of_rows(level, dtype):
    t, a, n = 37, 5, 67
    rows, weights = draw(t * a, n, dtype=dtype, seed=1), draw(t, a, seed=2)
    row_ids = torch.randperm(t * a, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    row_ids[::7] = -1
    want = torch.zeros(t, n)
    for row, slot in enumerate(row_ids.tolist()):
        if slot >= 0:
            want[slot // a] += weights.flatten()[slot] * rows[row].float()
    assert bits_equal(unpermute(level, rows, row_ids, weights), want.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("counts", [[0, 0], [1, 0, 2], [5, 1, 0, 40, 3], [0, 0, 300], [1] * 30])
def test_grouped_gemm_has_the_bits_of_linear(native, level, dtype, counts):
    n, o = 70, 53
    bounds = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    used = int(bounds[-1])
    x, w = draw(used + 3, n, dtype=dtype, seed=1), draw(len(counts), o, n, dtype=dtype, seed=2)
    for threads in (1, 3):
        native.set_num_threads(threads)
        y = grouped(level, x, w, bounds)
        for e in range(len(counts)):
            rows = slice(int(bounds[e]), int(bounds[e + 1]))
            want = torch.empty(counts[e], o, dtype=dtype)
            native.linear(level, x[rows], w[e], None, want)
            assert bits_equal(y[rows], want)
        assert bits_equal(y[used:], torch.zeros(3, o, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("t,a,e,n,i", SHAPES)
@pytest.mark.parametrize("limit", [None, 0.7])
def test_fused_experts_have_the_bits_of_their_composition(native, level, dtype, t, a, e, n, i, limit):
    x, weights = draw(t, n, dtype=dtype, seed=1), draw(t, a, seed=2)
    w = weights_of(e, n, i, dtype)
    for shuffle in (False, True):
        ids = routes(t, a, e, seed=3, shuffle=shuffle)
        native.set_num_threads(1)
        y = experts(level, x, ids, weights, *w, limit)
        assert not y.isnan().any()
        native.set_num_threads(3)
        assert bits_equal(composed(level, x, ids, weights, *w, limit), y)
        assert bits_equal(experts(level, x, ids, weights, *w, limit), y)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("t,a,e,n,i", SHAPES)
def test_fused_experts_agree_with_float64(level, dtype, t, a, e, n, i):
    x, ids, weights = draw(t, n, dtype=dtype, seed=1), routes(t, a, e, seed=3), draw(t, a, seed=2)
    gate_up, down = weights_of(e, n, i, dtype)
    y = experts(level, x, ids, weights, gate_up, down)
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    want, size = torch.zeros_like(x), torch.zeros_like(x)
    for slot in range(a):
        present = ids[:, slot] >= 0
        expert, weight = ids[present, slot].long(), weights[present, slot, None]
        gate, up = torch.einsum("ton,tn->to", gate_up[expert], x[present]).chunk(2, 1)
        hidden = gate / (1 + (-gate).exp()) * up
        want[present] += weight * torch.einsum("tni,ti->tn", down[expert], hidden)
        size[present] += weight.abs() * torch.einsum("tni,ti->tn", down[expert].abs(), hidden.abs() + 0.1)
    assert ((y.double() - want).abs() <= 8 * UNIT[dtype] * size + 1e-6).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_do_not_know_their_batch(native, level, dtype):
    t, a, e, n, i = 90, 3, 7, 72, 40
    x, ids, weights = draw(t, n, dtype=dtype, seed=1), routes(t, a, e, seed=3), draw(t, a, seed=2)
    w = weights_of(e, n, i, dtype)
    native.set_num_threads(1)
    y = experts(level, x, ids, weights, *w)
    native.set_num_threads(2)
    order = torch.randperm(t, generator=torch.Generator().manual_seed(4))
    for rows in (slice(0, 1), slice(3, 5), slice(60, 90), order):
        assert bits_equal(experts(level, x[rows], ids[rows], weights[rows], *w), y[rows])
    # The order of a token's slots does not matter either: the sum follows the expert ids.
    assert bits_equal(experts(level, x, ids.flip(1).contiguous(), weights.flip(1).contiguous(), *w), y)


def test_many_tokens_are_taken_in_chunks(native):
    """More hidden rows than are kept at a time; tokens repeat, so the answers must."""
    t, a, e, n, i = 9000, 2, 4, 8, 1024
    x, ids, weights = draw(10, n, seed=1), routes(10, a, e, seed=3), draw(10, a, seed=2)
    w = weights_of(e, n, i, torch.float32)
    level = min(2, native.cpu_level())
    want = experts(level, x, ids, weights, *w)
    repeat = t // 10
    got = experts(level, x.repeat(repeat, 1), ids.repeat(repeat, 1), weights.repeat(repeat, 1), *w)
    assert bits_equal(got, want.repeat(repeat, 1))


def test_tokens_without_experts_get_zero(level):
    ids = torch.tensor([[-1, -1], [0, -1]], dtype=torch.int32)
    y = experts(level, torch.ones(2, 3), ids, torch.ones(2, 2), torch.ones(1, 2, 3), torch.ones(1, 3, 1))
    assert bits_equal(y[0], torch.zeros(3))
    assert (y[1] != 0).all()


@pytest.mark.parametrize("t,a,e,n,i", [(0, 2, 3, 4, 5), (2, 0, 3, 4, 5), (2, 1, 3, 0, 5), (2, 1, 3, 4, 0)])
def test_empty_axes(level, t, a, e, n, i):
    x, ids = torch.ones(t, n), torch.zeros(t, a, dtype=torch.int32)
    w = torch.ones(e, 2 * i, n), torch.ones(e, n, i)
    assert bits_equal(experts(level, x, ids, torch.ones(t, a), *w), torch.zeros(t, n))
    assert bits_equal(composed(level, x, ids, torch.ones(t, a), *w), torch.zeros(t, n))


@pytest.mark.parametrize(
    "bad,sentence", [(3, "an expert id is 3"), (-2, "an expert id is -2"), (1, "names expert 1 twice")]
)
def test_wrong_ids_are_refused_before_anything_is_written(level, bad, sentence):
    ids = torch.tensor([[0, 2], [1, bad]], dtype=torch.int32)
    y = torch.full((2, 4), 7.0)
    with pytest.raises(ContractError, match=sentence):
        _C.moe_experts(
            level, torch.ones(2, 4), ids, torch.ones(2, 2), torch.ones(3, 2, 4), torch.ones(3, 4, 1), None, y
        )
    rows, row_ids, offsets = torch.full((4, 4), 7.0), torch.full((4,), 7, dtype=torch.int32), torch.full((4,), 7).int()
    with pytest.raises(ContractError, match=sentence):
        _C.moe_permute(level, torch.ones(2, 4), ids, 3, rows, row_ids, offsets)
    assert all((v == 7).all() for v in (y, rows, row_ids, offsets))


@pytest.mark.parametrize(
    "offsets,sentence",
    [
        ([1, 1, 2], r"offsets\[0\] is 1"),
        ([0, 2, 1], r"offsets\[2\] is 1 after 2"),
        ([0, 1, 4], "is 4, needs at most 3"),
    ],
)
def test_wrong_offsets_are_refused_before_anything_is_written(level, offsets, sentence):
    y = torch.full((3, 5), 7.0)
    with pytest.raises(ContractError, match=sentence):
        _C.grouped_gemm(level, torch.ones(3, 4), torch.ones(2, 5, 4), torch.tensor(offsets, dtype=torch.int32), y)
    assert (y == 7).all()


@pytest.mark.parametrize(
    "row_ids,sentence", [([0, 4], "is 4, needs -1 or"), ([-2, 0], "is -2"), ([3, 3], "slot 3 twice")]
)
def test_wrong_row_ids_are_refused_before_anything_is_written(level, row_ids, sentence):
    y = torch.full((2, 5), 7.0)
    with pytest.raises(ContractError, match=sentence):
        _C.moe_unpermute(level, torch.ones(2, 5), torch.tensor(row_ids, dtype=torch.int32), torch.ones(2, 2), y)
    assert (y == 7).all()


def test_a_nan_row_stays_in_its_token(level):
    x = torch.ones(3, 4)
    x[1] = math.nan
    ids = torch.zeros(3, 1, dtype=torch.int32)
    y = experts(level, x, ids, torch.ones(3, 1), torch.ones(1, 4, 4), torch.ones(1, 4, 2))
    assert y[1].isnan().all()
    assert not y[[0, 2]].isnan().any()
