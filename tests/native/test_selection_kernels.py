"""The indexer's selection and the fixed pattern: exact order, scores against float64, rows against their batch."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import FLOATS, bits_equal, draw
from paged_cases import paged

from glm5sdk.core.errors import ContractError
from glm5sdk_cpu import _C


def topk(level, iq, iw, cache, table, requests, kv_lens, k, format="plain", max_kv_len=1 << 20, workspace=1 << 28):
    requests, kv_lens = (torch.as_tensor(x, dtype=torch.int32) for x in (requests, kv_lens))
    indices, scores = torch.full((len(iq), 1, k), 7, dtype=torch.int32), torch.full((len(iq), 1, k), 7.0)
    arguments = (level, iq, iw, cache, table, requests, kv_lens, k, max_kv_len, format, workspace)
    _C.topk_indexer_with_scores(*arguments, indices, scores)
    alone = torch.full_like(indices, 7)
    _C.topk_indexer(*arguments, alone)
    assert torch.equal(alone, indices)
    return indices, scores


def best(scores, k):
    """Positions of the k best, ascending: a stable sort with -0 as +0 and NaN as -inf."""
    scores = scores.nan_to_num(-math.inf, posinf=math.inf, neginf=-math.inf) + 0.0
    return scores.sort(descending=True, stable=True).indices[:k].sort().values


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", ["plain", "fp8"])
@pytest.mark.parametrize("k", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("h,d,size", [(3, 12, 5), (9, 33, 1), (1, 128, 64), (32, 128, 64)])
def test_scores_and_selection(level, dtype, format, k, h, d, size):
    case = paged(draw(2, 230, d, seed=k, dtype=dtype), size, format, d)
    requests, kv_lens = [1, 0, -1, 0, 1, 1], [230, 64, 99, 0, 128, 65]
    iq, iw = draw(6, h, d, seed=k + 1, dtype=dtype), draw(6, h, seed=k + 2)
    indices, scores = topk(level, iq, iw, case.cache, case.table, requests, kv_lens, k, format)
    # Every score once: all keys selected.
    _, whole = topk(level, iq, iw, case.cache, case.table, requests, kv_lens, 230, format)
    for t, (request, length) in enumerate(zip(requests, kv_lens, strict=True)):
        count = min(k, length) if request >= 0 else 0
        assert (indices[t, 0, count:] == -1).all() and (scores[t, 0, count:] == -math.inf).all()
        if count == 0:
            continue
        keys = case.keys[request][:length]
        terms = (iq[t].double() @ keys.T).relu() * iw[t].double()[:, None]
        size_of = (iq[t].double().abs() @ keys.abs().T * iw[t].double().abs()[:, None]).sum(0)
        assert ((whole[t, 0, :length] - terms.sum(0)).abs() <= 2.0**-20 * size_of + 1e-30).all()
        chosen = indices[t, 0, :count].long()
        assert torch.equal(chosen, best(whole[t, 0, :length], k))
        assert bits_equal(scores[t, 0, :count], whole[t, 0][chosen])


def test_ties_nan_infinities_and_zeros_have_one_order(level):
    """Width 1 and one head of weight 1: the score of a key is relu of the key."""
    values = [1.0, 2.0, 2.0, -0.0, 0.0, math.nan, -5.0, 2.0, math.inf, 1.0, 3e-45, math.nan]
    case = paged(torch.tensor(values)[None, :, None], 4, "plain", 1)
    for weight in (1.0, -1.0):
        scores = torch.tensor(values).relu() * weight
        for k in range(1, 13):
            one, w = torch.ones(1, 1, 1), torch.tensor([[weight]])
            indices, got = topk(level, one, w, case.cache, case.table, [0], [12], k)
            want = best(scores, k)
            assert indices.flatten().tolist() == want.tolist()
            assert torch.equal(got.flatten(), scores[want].nan_to_num(-math.inf, math.inf, -math.inf) + 0.0)


@pytest.mark.parametrize("values", ["equal", "few", "dense", "wide"])
def test_selection_among_many(level, values):
    n, generator = 5000, torch.Generator().manual_seed(11)
    keys = {
        "equal": torch.ones(n),
        "few": torch.randint(4, (n,), generator=generator).float(),
        "dense": 1 + torch.randint(3000, (n,), generator=generator) * 2.0**-23,
        "wide": 2.0 ** torch.randint(-120, 120, (n,), generator=generator),
    }[values]
    case = paged(keys[None, :, None], 64, "plain", 1)
    for k in (1, 2, 999, 2048, 4999, 5000, 6000):
        indices, _ = topk(level, torch.ones(1, 1, 1), torch.ones(1, 1), case.cache, case.table, [0], [n], k)
        want = best(keys, k)
        assert torch.equal(indices[0, 0, : len(want)].long(), want) and (indices[0, 0, len(want) :] == -1).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", ["plain", "fp8"])
@pytest.mark.parametrize("h,d", [(3, 12), (6, 40)])
def test_rows_do_not_know_their_batch(native, level, dtype, format, h, d):
    """Slices, orders, neighbours of the same request, page sizes, workspaces and threads: the same bits."""
    rows = draw(2, 1300, d, seed=3, dtype=dtype)
    case = paged(rows, 64, format, d)
    requests = torch.tensor([0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    kv_lens = torch.tensor([1300, 3, 64, 1299, 65, 1, 700, 701, 702, 703, 704, 705, 706, 707])
    iq, iw = draw(14, h, d, seed=5, dtype=dtype), draw(14, h, seed=6)
    native.set_num_threads(1)
    want = topk(level, iq, iw, case.cache, case.table, requests, kv_lens, 90, format)
    for threads in (1, 2, 5):
        native.set_num_threads(threads)
        for pick in (torch.arange(14), torch.tensor([6, 0, 3]), torch.tensor([5]), torch.arange(13, -1, -1)):
            for workspace in (0, 11000, 1 << 28):
                got = topk(
                    level, iq[pick], iw[pick], case.cache, case.table, requests[pick], kv_lens[pick], 90, format,
                    workspace=workspace,
                )  # fmt: skip
                assert bits_equal(got[0], want[0][pick]) and bits_equal(got[1], want[1][pick])
        for size in (1, 5):
            other = paged(rows, size, format, d, seed=size)
            got = topk(level, iq, iw, other.cache, other.table, requests, kv_lens, 90, format)
            assert bits_equal(got[0], want[0]) and bits_equal(got[1], want[1])


def test_no_tokens_no_keys_no_choice(level):
    cache, table = torch.full((1, 2, 5), torch.nan), torch.zeros(1, 1, dtype=torch.int32)
    topk(level, torch.ones(0, 2, 5), torch.ones(0, 2), cache, table, [], [], 3)
    topk(level, torch.ones(2, 2, 5), torch.ones(2, 2), cache, table, [0, 0], [2, 1], 0)
    indices, scores = topk(level, torch.ones(2, 2, 5), torch.ones(2, 2), cache, table, [0, -1], [0, 2], 3)
    assert (indices == -1).all() and (scores == -math.inf).all()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"requests": [0, 2]}, r"request_ids\[1\] is 2, needs -1 to 1"),
        ({"kv_lens": [9, 1]}, r"kv_lens\[0\] is 9, needs 0 to 8 \(the tokens its pages hold\)"),
        ({"kv_lens": [4, 1], "max_kv_len": 3}, r"kv_lens\[0\] is 4, needs 0 to 3 \(max_kv_len\)"),
        ({"kv_lens": [1, -1]}, r"kv_lens\[1\] is -1, needs 0 to 8"),
        ({"kv_lens": [5, 1]}, r"block_table\[0, 1\] is 9, needs 0 to 2"),
        ({"format": "fp8_ds_mla"}, 'format is "fp8_ds_mla", needs "plain" or "fp8"'),
    ],
)
def test_bad_values_are_refused_before_anything_is_written(level, change, message):
    table = torch.tensor([[0, 9], [1, 2]], dtype=torch.int32)
    requests = torch.tensor(change.get("requests", [0, 1]), dtype=torch.int32)
    kv_lens = torch.tensor(change.get("kv_lens", [1, 1]), dtype=torch.int32)
    indices = torch.full((2, 1, 3), 7, dtype=torch.int32)
    with pytest.raises(ContractError, match=f"topk_indexer: {message}"):
        _C.topk_indexer(
            level, torch.ones(2, 3, 5), torch.ones(2, 3), torch.ones(3, 4, 5), table, requests, kv_lens, 3,
            change.get("max_kv_len", 100), change.get("format", "plain"), 1 << 28, indices,
        )  # fmt: skip
    assert (indices == 7).all()


@pytest.mark.parametrize("window,stride", [(0, 1), (0, 7), (5, 1), (5, 3), (64, 64), (1000, 2)])
@pytest.mark.parametrize("k", [0, 1, 10, 300])
def test_window_and_stride(level, window, stride, k):
    lengths = [0, 1, 5, 6, 64, 65, 200]
    indices = torch.full((len(lengths), 1, k), 7, dtype=torch.int32)
    _C.window_stride_indices(level, torch.tensor(lengths, dtype=torch.int32), window, stride, k, indices)
    for row, length in zip(indices[:, 0].tolist(), lengths, strict=True):
        seen = [p for p in range(length) if p >= length - window or p % stride == 0]
        newest = seen[max(0, len(seen) - k) :]
        assert row == newest + [-1] * (k - len(newest))


def test_window_and_stride_refuse_senseless_numbers(level):
    indices = torch.full((1, 1, 2), 7, dtype=torch.int32)
    for length, window, stride in ((-1, 1, 1), (1, -1, 1), (1, 1, 0)):
        with pytest.raises(ContractError, match="window_stride_indices: "):
            _C.window_stride_indices(level, torch.tensor([length], dtype=torch.int32), window, stride, 2, indices)
    assert (indices == 7).all()
