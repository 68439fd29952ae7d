"""topk_indexer and its twin with scores: a total order, against loops and transformers, whatever the workspace."""

from __future__ import annotations

import math

import pytest
import torch
from attention_oracle import best, i32, index_score, integers, key_at, normal, padded
from op_oracle import opcheck
from torch import Tensor

from glm5sdk import ops
from glm5sdk.core.errors import ContractError
from glm5sdk.ops._cache import read_index_rows
from glm5sdk.ops._indexer import compare_selection

HEADS, DIM, SIZE = 3, 4, 5
TABLE = i32([[3, 0, 5], [1, 4, 2]])
REQUESTS = i32([1, 0, -1, 0, 1, 0])
LENGTHS = i32([15, 7, 9, 0, 1, 13])


def arguments(exact: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    make = integers if exact else normal
    iq, cache = make(6, HEADS, DIM, seed=1, dtype=dtype), make(6, SIZE, DIM, seed=2, dtype=dtype)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    return iq, make(6, HEADS, seed=3, dtype=acc), cache, TABLE, REQUESTS, LENGTHS


@pytest.mark.parametrize("topk", [1, 4, 7, 20])
def test_equals_loops_with_many_ties(topk: int) -> None:
    iq, iw, cache, *rest = arguments(exact=True)
    indices, scores = ops.topk_indexer_with_scores.reference(iq, iw, cache, *rest, topk, 15)
    assert torch.equal(ops.topk_indexer.reference(iq, iw, cache, *rest, topk, 15), indices)
    for t, (request, length) in enumerate(zip(REQUESTS.tolist(), LENGTHS.tolist(), strict=True)):
        keys = [key_at(cache, TABLE, request, p) for p in range(length if request >= 0 else 0)]
        found = [index_score(iq[t].tolist(), iw[t].tolist(), k) for k in keys]
        chosen = best(found, topk)
        assert indices[t, 0].tolist() == padded(chosen, topk)
        assert scores[t, 0].tolist() == [found[p] for p in chosen] + [-math.inf] * (topk - len(chosen))


def scored(values: list[float], topk: int) -> tuple[list[int], list[float]]:
    """Select among keys whose scores are these values: one head, one dimension, weight 1 or -1 by a second head."""
    keys = torch.tensor([[max(v, 0.0), max(-v, 0.0)] if not math.isnan(v) else [v, v] for v in values])
    iq, iw = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[1.0, -1.0]])
    indices, scores = ops.topk_indexer_with_scores.reference(
        iq, iw, keys[None], i32([[0]]), i32([0]), i32([len(values)]), topk, len(values)
    )
    return indices[0, 0].tolist(), scores[0, 0].tolist()


def test_order_is_total() -> None:
    nan, inf = math.nan, math.inf
    assert scored([2.0, 3.0, 3.0, 1.0, 3.0], 2) == ([1, 2], [3.0, 3.0])
    assert scored([-1.0, -3.0, -2.0], 2) == ([0, 2], [-1.0, -2.0])
    assert scored([nan, 1.0, -5.0], 2) == ([1, 2], [1.0, -5.0])
    assert scored([nan, nan, -5.0], 2) == ([0, 2], [-inf, -5.0])
    assert scored([nan, nan], 3) == ([0, 1, -1], [-inf, -inf, -inf])


def test_minus_zero_is_zero() -> None:
    iq, iw = torch.ones(1, 1, 1), torch.tensor([[-1.0]])  # -1 * relu(0) = -0
    keys = torch.tensor([[[0.0], [-1.0], [0.0]]])
    indices, scores = ops.topk_indexer_with_scores.reference(iq, iw, keys, i32([[0]]), i32([0]), i32([3]), 2, 3)
    assert indices[0, 0].tolist() == [0, 1]
    assert [math.copysign(1, s) for s in scores[0, 0].tolist()] == [1, 1]


def test_equals_transformers_scores() -> None:
    # GlmMoeDsaIndexer: matmul in float32 * head_dim^-0.5, relu, weights * n_heads^-0.5, sum over heads.
    heads, dim, length = 32, 128, 96
    q, k, w = normal(length, heads, dim, seed=4), normal(length, dim, seed=5), normal(length, heads, seed=6)
    scores = torch.matmul(q[None], k.T) * dim**-0.5
    theirs = torch.matmul((w * heads**-0.5)[:, None], scores[0].relu())[:, 0]
    theirs = theirs.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)
    want = theirs.topk(8).indices.sort().values
    got, ours = ops.topk_indexer_with_scores.reference(
        q, w * heads**-0.5 * dim**-0.5, k[None], i32([[0]]), torch.zeros(length).int(),
        torch.arange(1, length + 1).int(), 8, length,
    )  # fmt: skip
    assert torch.equal(got[8:, 0].long(), want[8:])
    torch.testing.assert_close(ours[8:, 0], theirs.gather(1, want)[8:], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workspace_does_not_change_the_answer(dtype: torch.dtype) -> None:
    iq, iw = normal(70, 8, 32, seed=7, dtype=dtype), normal(70, 8, seed=8, dtype=torch.float32)
    cache = normal(9, 16, 32, seed=9, dtype=dtype)
    requests = torch.arange(70).int() % 3
    lengths = (torch.arange(70).int() * 7) % 49
    rest = (iq, iw, cache, torch.arange(9).view(3, 3).int(), requests, lengths, 11, 48, "plain")
    want = ops.topk_indexer_with_scores.reference(*rest)
    for budget in (0, 20_000, 50_000, 100_000, 2**20):
        got = ops.topk_indexer_with_scores.reference(*rest, budget)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


def test_fp8_keys_score_as_their_values() -> None:
    iq, iw, cache, *rest = arguments(exact=False)
    packed = torch.zeros(6, SIZE * (DIM + 4), dtype=torch.uint8)
    ops.cache_index_keys.reference(cache.view(-1, DIM), packed, torch.arange(6 * SIZE), "fp8")
    plain = read_index_rows(packed, torch.arange(6 * SIZE), DIM, "fp8", torch.float32).view(6, SIZE, DIM)
    got = ops.topk_indexer_with_scores.reference(iq, iw, packed, *rest, 4, 15, "fp8")
    want = ops.topk_indexer_with_scores.reference(iq, iw, plain, *rest, 4, 15, "plain")
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_judge_accepts_the_reference_and_rejects_a_wrong_key() -> None:
    given = arguments(exact=False)
    names = ("iq", "iw", "index_cache", "block_table", "request_ids", "kv_lens")
    values = dict(zip(names, given, strict=True))
    indices, scores = ops.topk_indexer_with_scores.reference(*given, 4, 15)
    compare_selection(values, (indices, scores), (indices, scores), 1e-6)
    missing = torch.tensor([p for p in range(15) if p not in indices[0, 0].tolist()])
    for wrong in (
        torch.cat([indices[0, 0, :3], missing[-1:]]).sort().values,  # a worse key
        indices[0, 0].flip(0),
        torch.tensor([*indices[0, 0, :3].tolist(), -1]),
    ):
        changed = indices.clone()
        changed[0, 0] = wrong
        with pytest.raises(AssertionError, match="row 0"):
            compare_selection(values, (changed,), (indices,), 1e-6)
    with pytest.raises(AssertionError, match="off by"):
        compare_selection(values, (indices, scores + 0.5), (indices, scores), 1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({5: i32([16, 7, 9, 0, 1, 13])}, r"kv_lens\[0\] is 16"),
        ({4: i32([2, 0, -1, 0, 1, 0])}, r"request_ids\[0\] is 2"),
        ({3: i32([[3, 0, 5], [1, 6, 2]])}, r"block_table\[1\]"),
    ],
)
def test_bad_values_are_refused(change: dict[int, Tensor], words: str) -> None:
    given = [change.get(i, a) for i, a in enumerate(arguments(exact=True))]
    with pytest.raises(ContractError, match=words):
        ops.topk_indexer.reference(*given, 4, 15)


def test_lengths_above_max_kv_len_are_refused() -> None:
    with pytest.raises(ContractError, match="max_kv_len"):
        ops.topk_indexer.reference(*arguments(exact=True), 4, 14)


def test_torch_view_and_no_rows() -> None:
    opcheck(ops.topk_indexer, *arguments(exact=True), 4, 15)
    empty = ops.topk_indexer.reference(
        torch.ones(0, 2, 4), torch.ones(0, 2), torch.ones(1, 2, 4), i32([[0]]), i32([]), i32([]), 3, 2
    )
    assert empty.shape == (0, 1, 3)
