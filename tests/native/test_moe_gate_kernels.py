"""The router's kernel against float64 loops: scores, total order, groups, and rows that do not know their batch."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import FLOATS, draw

from glm5sdk.core.errors import ContractError
from glm5sdk_cpu import _C


def gate(
    level, x, w, bias, topk, n_group=1, topk_group=1, score="sigmoid", renormalise=True, scale=1.0, temperature=1.0
):
    ids = torch.full((x.shape[0], topk), -7, dtype=torch.int32)
    weights = torch.full((x.shape[0], topk), math.nan)
    _C.moe_gate(level, x, w, bias, topk, n_group, topk_group, score, renormalise, scale, temperature, ids, weights)
    return ids, weights


def scores_of(x, w, score="sigmoid", temperature=1.0):
    logits = x.double() @ w.double().t() / temperature
    return logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)


def chosen(choice, topk, n_group=1, topk_group=1):
    """One token: plain loops over a list of choice scores."""
    choice = [-math.inf if math.isnan(v) else v for v in choice]
    size = len(choice) // n_group
    members = [range(g * size, (g + 1) * size) for g in range(n_group)]
    if n_group > 1:
        sums = [sum(sorted((choice[i] for i in m), reverse=True)[:2]) for m in members]
        members = [members[g] for g in sorted(range(n_group), key=lambda g: (-sums[g], g))[:topk_group]]
    experts = [i for m in members for i in m]
    return sorted(sorted(experts, key=lambda i: (-choice[i], i))[:topk])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 2.5},
        {"renormalise": False},
        {"n_group": 4, "topk_group": 2},
        {"score": "softmax", "temperature": 0.5},
        {"score": "softmax", "renormalise": False, "n_group": 2, "topk_group": 1},
    ],
)
@pytest.mark.parametrize("t,n,e", [(5, 7, 12), (70, 65, 16), (3, 192, 8)])
def test_router_agrees_with_float64(level, dtype, options, t, n, e):
    topk = 2
    x, w, bias = draw(t, n, dtype=dtype, seed=1), draw(e, n, seed=2, scale=n**-0.5), 7 + draw(e, seed=3, scale=0.05)
    ids, weights = gate(level, x, w, bias, topk, **options)
    scores = scores_of(x, w, options.get("score", "sigmoid"), options.get("temperature", 1.0))
    groups = options.get("n_group", 1), options.get("topk_group", 1)
    for row in range(t):
        got = ids[row].tolist()
        # Exact in double from the scores a float32 router saw: the order is the kernel's, the rule is the loop's.
        choice = (scores[row].float() + bias).tolist()
        want = chosen(choice, topk, *groups)
        if got != want:  # legitimate only where float32 cannot tell
            assert max(abs(choice[a] - choice[b]) for a, b in zip(got, want, strict=True)) < 4e-6
        s = scores[row][got]
        if options.get("renormalise", True):
            s = s / (s.sum() + 1e-20)
        torch.testing.assert_close(weights[row].double(), s * options.get("scale", 1.0), rtol=2e-5, atol=1e-7)


def test_ties_go_to_the_lower_expert(level):
    x, w = torch.ones(1, 4), torch.zeros(9, 4)
    assert gate(level, x, w, None, 4)[0].tolist() == [[0, 1, 2, 3]]
    assert gate(level, x, torch.zeros(8, 4), None, 3, n_group=4, topk_group=2)[0].tolist() == [[0, 1, 2]]
    bias = torch.tensor([0.0, 1, 0, 1, 0, 1, 0, 1, 0])
    ids, weights = gate(level, x, w, bias, 3, scale=3.0)
    assert ids.tolist() == [[1, 3, 5]]
    assert weights.tolist() == [[1.0, 1.0, 1.0]]  # the bias chooses, it does not weigh


def test_nan_counts_as_minus_infinity(level):
    bias = torch.tensor([math.nan, -math.inf, 0.0, math.nan, -5.0, math.nan])
    ids, _ = gate(level, torch.ones(1, 3), torch.zeros(6, 3), bias, 3)
    assert ids.tolist() == [[0, 2, 4]]
    # A group of NaN that won anyway keeps other groups out.
    ids, _ = gate(level, torch.ones(1, 3), torch.zeros(6, 3), torch.full((6,), math.nan), 2, n_group=3, topk_group=1)
    assert ids.tolist() == [[0, 1]]


def test_rows_do_not_know_their_batch(native, level):
    for dtype in FLOATS:
        x, w, bias = draw(67, 130, dtype=dtype, seed=1), draw(40, 130, seed=2), draw(40, seed=3)
        native.set_num_threads(1)
        ids, weights = gate(level, x, w, bias, 6, 4, 2)
        native.set_num_threads(3)
        order = torch.randperm(67, generator=torch.Generator().manual_seed(4))
        for rows in (slice(0, 1), slice(5, 8), slice(40, 67), order):
            again = gate(level, x[rows].contiguous(), w, bias, 6, 4, 2)
            assert torch.equal(again[0], ids[rows])
            assert torch.equal(again[1], weights[rows])


def test_edges(level):
    ids, weights = gate(level, torch.empty(0, 5), torch.ones(4, 5), None, 2)
    assert ids.shape == weights.shape == (0, 2)
    ids, weights = gate(level, torch.empty(2, 0), torch.empty(4, 0), None, 4, scale=2.0)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.tolist() == [[0.5] * 4] * 2


@pytest.mark.parametrize(
    "topk,options,sentence",
    [
        (9, {}, "topk is 9, needs at most 8"),
        (5, {"n_group": 4, "topk_group": 2}, "topk is 5, needs at most 4"),
        (1, {"n_group": 3}, "n_group is 3, needs to divide 8"),
        (1, {"n_group": 8}, "at least 2"),
        (1, {"n_group": 0}, "n_group is 0"),
        (1, {"n_group": 2, "topk_group": 3}, "topk_group is 3"),
        (1, {"score": "relu"}, "score is 'relu'"),
        (1, {"temperature": 0.0}, "temperature is 0"),
    ],
)
def test_senseless_options_are_refused_before_anything_is_written(level, topk, options, sentence):
    full = {"n_group": 1, "topk_group": 1, "score": "sigmoid", "renormalise": True, "scale": 1.0, "temperature": 1.0}
    ids, weights = torch.full((1, topk), 7, dtype=torch.int32), torch.full((1, topk), 7.0)
    with pytest.raises(ContractError, match=sentence):
        _C.moe_gate(level, torch.ones(1, 2), torch.ones(8, 2), None, topk, *{**full, **options}.values(), ids, weights)
    assert (ids == 7).all()
    assert (weights == 7).all()
