"""Sparse and dense latent attention against float64, and each row against its batch, its pages and its threads."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import BF16_PRODUCTS, FLOATS, UNIT, bits_equal, draw
from paged_cases import paged, selections

from glm5sdk.core.errors import ContractError
from glm5sdk_cpu import _C

SCALE = 0.17


def sparse(level, q, cache, table, requests, indices, v_dim, format="plain", scale=SCALE):
    out, lse = torch.full((*q.shape[:2], v_dim), 7.0, dtype=q.dtype), torch.full(q.shape[:2], 7.0)
    requests = torch.as_tensor(requests, dtype=torch.int32)
    _C.sparse_flash_attention(level, q, cache, table, requests, indices, scale, v_dim, format, out, lse)
    return out, lse


def dense(level, q, cache, table, requests, kv_lens, v_dim, format="plain", scale=SCALE):
    out, lse = torch.full((*q.shape[:2], v_dim), 7.0, dtype=q.dtype), torch.full(q.shape[:2], 7.0)
    requests, kv_lens = (torch.as_tensor(x, dtype=torch.int32) for x in (requests, kv_lens))
    _C.flash_mla(level, q, cache, table, requests, kv_lens, scale, v_dim, format, out, lse)
    return out, lse


def attend64(q, keys, v_dim, scale):
    """Heads of one token in float64: q [h, L], keys [n, L]; also what the sums were made of, [h, C]."""
    scores = q.double() @ keys.T * scale
    p = torch.softmax(scores, -1)
    return p @ keys[:, :v_dim], torch.logsumexp(scores, -1), p @ keys[:, :v_dim].abs()


def check(q, case, requests, chosen, got, v_dim, scale=SCALE, rounded_p=False):
    """`chosen[t]` are the positions of all heads, or of each. p feels an error of a score, a sum in f32, as e^error.

    rounded_p: the kernel multiplies values by p rounded to bf16.
    """
    out, lse = got
    of_p = UNIT[torch.bfloat16] / 2 if rounded_p else 0.0
    for t, request in enumerate(requests):
        step = q.shape[1] // len(chosen[t])
        for g, positions in enumerate(chosen[t]):
            heads = slice(g * step, (g + 1) * step)
            if request < 0 or len(positions) == 0:
                assert (out[t, heads] == 0).all() and (lse[t, heads] == -math.inf).all()
                continue
            keys = case.keys[request][positions]
            want, want_lse, size = attend64(q[t, heads], keys, v_dim, scale)
            slack = 2.0**-21 * (4 + abs(scale) * (q[t, heads].double().abs() @ keys.abs().T).amax(-1))
            assert ((lse[t, heads] - want_lse).abs() <= slack + 2.0**-23 * want_lse.abs()).all()
            error = (out[t, heads].double() - want).abs()
            assert (error <= (2 * slack[:, None] + of_p) * size + UNIT[out.dtype] * want.abs() + 1e-7).all(), float(
                error.max()
            )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", ["plain", "fp8_ds_mla"])
@pytest.mark.parametrize("k", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("h,c,r,size", [(3, 40, 20, 5), (9, 33, 2, 1), (1, 130, 6, 64)])
def test_attention_agrees_with_float64(level, dtype, format, k, h, c, r, size):
    case = paged(draw(2, 230, c + r, seed=k, dtype=dtype), size, format, c)
    requests = [1, 0, -1, 0, 1]
    kv_lens = torch.tensor([230, 64, 99, 0, 128])
    q = draw(5, h, c + r, seed=k + 1, dtype=dtype)
    rounded_p = dtype == torch.bfloat16 and format == "plain" and level >= BF16_PRODUCTS
    for groups in {1, h}:
        indices = selections(kv_lens, groups, k, seed=k)
        got = sparse(level, q, case.cache, case.table, requests, indices, c, format)
        check(
            q,
            case,
            requests,
            [[row[row >= 0].long() for row in token] for token in indices],
            got,
            c,
            rounded_p=rounded_p,
        )
    got = dense(level, q, case.cache, case.table, requests, kv_lens.clamp_max(k), c, format)
    check(q, case, requests, [[torch.arange(min(k, n))] for n in kv_lens.tolist()], got, c, rounded_p=rounded_p)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", ["plain", "fp8_ds_mla"])
def test_dense_is_sparse_over_all_positions_bit_for_bit(level, dtype, format):
    c, r, h = 40, 20, 5
    case = paged(draw(3, 150, c + r, seed=1, dtype=dtype), 7, format, c)
    requests, kv_lens = [2, 0, 1, 1, -1], torch.tensor([150, 1, 64, 65, 3])
    q = draw(5, h, c + r, seed=2, dtype=dtype)
    everything = torch.arange(150).int().expand(5, 1, 150)
    everything = torch.where(everything < kv_lens[:, None, None], everything, -1).int()
    want = dense(level, q, case.cache, case.table, requests, kv_lens, c, format)
    for indices in (everything, everything.expand(5, h, 150).contiguous()):
        got = sparse(level, q, case.cache, case.table, requests, indices, c, format)
        assert bits_equal(got[0], want[0]) and bits_equal(got[1], want[1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", ["plain", "fp8_ds_mla"])
@pytest.mark.parametrize("h,c,r", [(3, 40, 20), (70, 16, 4)])
def test_rows_do_not_know_their_batch(native, level, dtype, format, h, c, r):
    """Slices, orders, page sizes, heads and thread counts: the same bits."""
    rows = draw(2, 200, c + r, seed=3, dtype=dtype)
    case = paged(rows, 64, format, c)
    requests = torch.tensor([0, 1, 1, 0, 1, 0, 0])
    kv_lens = torch.tensor([200, 3, 64, 130, 65, 1, 199])
    indices, q = selections(kv_lens, 1, 90, seed=4), draw(7, h, c + r, seed=5, dtype=dtype)
    native.set_num_threads(1)
    want = sparse(level, q, case.cache, case.table, requests, indices, c, format)

    def same(got, pick, heads=slice(None)):
        return all(bits_equal(g, w[pick][:, heads].contiguous()) for g, w in zip(got, want, strict=True))

    for threads in (1, 2, 5):
        native.set_num_threads(threads)
        for pick in (torch.arange(7), torch.tensor([6, 0, 3]), torch.tensor([5]), torch.tensor([4, 4, 1, 2])):
            got = sparse(level, q[pick], case.cache, case.table, requests[pick], indices[pick], c, format)
            assert same(got, pick)
        for size in (1, 5):
            other = paged(rows, size, format, c, seed=size)
            assert same(sparse(level, q, other.cache, other.table, requests, indices, c, format), slice(None))
        for heads in (slice(0, 1), slice(1, 3)):
            got = sparse(level, q[:, heads].contiguous(), case.cache, case.table, requests, indices, c, format)
            assert same(got, slice(None), heads)


def test_the_real_geometry(native, level):
    c, r, h, dtype = 512, 64, 64, torch.bfloat16
    case = paged(draw(2, 700, c + r, seed=6, dtype=dtype), 64, "plain", c)
    q, kv_lens = draw(3, h, c + r, seed=7, dtype=dtype), torch.tensor([700, 512, 130])
    indices = selections(kv_lens, 1, 500, seed=8)
    got = sparse(level, q, case.cache, case.table, [0, 1, 1], indices, c, scale=0.0625)
    chosen = [[token[0][token[0] >= 0].long()] for token in indices]
    check(q, case, [0, 1, 1], chosen, got, c, scale=0.0625, rounded_p=level >= BF16_PRODUCTS)
    native.set_num_threads(1)
    alone = sparse(level, q[1:2].clone(), case.cache, case.table, [1], indices[1:2].clone(), c, scale=0.0625)
    assert bits_equal(alone[0][0], got[0][1]) and bits_equal(alone[1][0], got[1][1])


def test_scores_far_apart_and_equal(level):
    """A block may raise the maximum by more than f32 can hold as a factor; equal scores share evenly."""
    rows = torch.zeros(1, 130, 4)
    rows[0, :, 0] = torch.arange(130)
    case = paged(rows, 8, "plain", 3)
    q = torch.tensor([[[50.0, 0, 0, 0]], [[-50.0, 0, 0, 0]], [[0.0, 0, 0, 0]]])
    out, lse = dense(level, q, case.cache, case.table, [0, 0, 0], [130] * 3, 3, scale=1.0)
    assert out[0, 0, 0] == 129 and out[1, 0, 0] < 1e-20 and abs(out[2, 0, 0] - 64.5) < 1e-4
    assert lse[0, 0] == 50 * 129 and lse[1, 0] == 0 and abs(lse[2, 0] - math.log(130)) < 1e-6


def test_a_nan_key_reaches_only_those_who_look_at_it(level):
    rows = draw(1, 100, 6, seed=9)
    rows[0, 70] = torch.nan
    case = paged(rows, 10, "plain", 4)
    q = draw(2, 2, 6, seed=10)
    out, lse = dense(level, q, case.cache, case.table, [0, 0], [70, 100], 4)
    assert not out[0].isnan().any() and not lse[0].isnan().any()
    assert out[1].isnan().all() and lse[1].isnan().all()


def test_no_tokens_no_keys(level):
    cache, table = torch.full((1, 2, 5), torch.nan), torch.zeros(1, 1, dtype=torch.int32)
    sparse(level, torch.ones(0, 2, 5), cache, table, [], torch.zeros(0, 1, 3, dtype=torch.int32), 3)
    out, lse = sparse(level, torch.ones(2, 2, 5), cache, table, [0, -1], torch.zeros(2, 1, 0, dtype=torch.int32), 3)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"requests": [0, 2]}, r"request_ids\[1\] is 2, needs -1 to 1"),
        ({"requests": [-2, 0]}, r"request_ids\[0\] is -2, needs -1 to 1"),
        ({"indices": [[[0, 1]], [[3, 8]]]}, r"indices\[1, 0, 1\] is 8, needs -1 to 7"),
        ({"indices": [[[0, 1]], [[3, 3]]]}, r"indices\[1, 0, 1\] is 3 after 3, needs strictly ascending"),
        ({"indices": [[[3, 1]], [[3, -1]]]}, r"indices\[0, 0, 1\] is 1 after 3, needs strictly ascending"),
        ({"indices": [[[-1, 1]], [[3, -1]]]}, r"indices\[0, 0, 1\] is 1 after -1, needs strictly ascending"),
        ({"indices": [[[0, 6]], [[3, -1]]]}, r"block_table\[0, 1\] is 9, needs 0 to 2"),
        ({"format": "fp8"}, 'format is "fp8", needs "plain" or "fp8_ds_mla"'),
        ({"kv_lens": [9, 1]}, r"kv_lens\[0\] is 9, needs 0 to 8"),
        ({"kv_lens": [1, -1]}, r"kv_lens\[1\] is -1, needs 0 to 8"),
        ({"kv_lens": [5, 1]}, r"block_table\[0, 1\] is 9, needs 0 to 2"),
    ],
)
def test_bad_values_are_refused_before_anything_is_written(level, change, message):
    q, cache = torch.ones(2, 3, 5), torch.ones(3, 4, 5)
    table = torch.tensor([[0, 9], [1, 2]], dtype=torch.int32)
    requests = torch.tensor(change.get("requests", [0, 1]), dtype=torch.int32)
    out, lse = torch.full((2, 3, 4), 7.0), torch.full((2, 3), 7.0)
    format = change.get("format", "plain")
    if "kv_lens" not in change:
        indices = torch.tensor(change.get("indices", [[[0, 1]], [[3, -1]]]), dtype=torch.int32)
        with pytest.raises(ContractError, match=f"sparse_flash_attention: {message}"):
            _C.sparse_flash_attention(level, q, cache, table, requests, indices, 1.0, 4, format, out, lse)
    if "indices" not in change:
        kv_lens = torch.tensor(change.get("kv_lens", [1, 1]), dtype=torch.int32)
        with pytest.raises(ContractError, match=f"flash_mla: {message}"):
            _C.flash_mla(level, q, cache, table, requests, kv_lens, 1.0, 4, format, out, lse)
    assert (out == 7).all() and (lse == 7).all()


def test_values_of_padding_rows_are_not_looked_at(level):
    table = torch.tensor([[0, 9]], dtype=torch.int32)
    indices = torch.tensor([[[99, 5]], [[0, 1]]], dtype=torch.int32)
    cache, q = torch.ones(1, 2, 5), torch.ones(2, 1, 5)
    for out, lse in (
        sparse(level, q, cache, table, [-1, 0], indices, 4),
        dense(level, q, cache, table, [-1, 0], [-5, 2], 4),
    ):
        assert (out[0] == 0).all() and lse[0, 0] == -math.inf and (out[1] == 1).all()
