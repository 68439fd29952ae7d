"""indexer_kl: against loops, dense and sparse, empty rows, gradients to the indexer alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_oracle import dot, i32, index_score, key_at, normal
from op_oracle import check_backward, leaf, opcheck
from torch import Tensor

from glm5sdk import ops
from glm5sdk.core.errors import ContractError

C, R, H, HI, DI, SCALE = 5, 2, 3, 2, 4, 0.4
TABLE = i32([[4, 1], [0, 3]])
REQUESTS = i32([1, 0, -1, 1, 0])
LENGTHS = i32([6, 4, 3, 0, 5])
INDICES = i32([[[0, 2, 4, 5]], [[1, 3, -1, -1]], [[0, 1, 2, 3]], [[-1, -1, -1, -1]], [[2, -1, -1, -1]]])


def arguments(indices: Tensor | None) -> tuple[Any, ...]:
    iq, iw, keys = normal(5, HI, DI, seed=1), normal(5, HI, seed=2), normal(5, 3, DI, seed=3)
    q, cache = normal(5, H, C + R, seed=4), normal(5, 3, C + R, seed=5)
    if indices is None:
        _, lse = ops.flash_mla.reference(q, cache, TABLE, REQUESTS, LENGTHS, SCALE, C)
    else:
        _, lse = ops.sparse_flash_attention.reference(q, cache, TABLE, REQUESTS, indices, SCALE, C)
    return iq, iw, keys, q, cache, lse, TABLE, REQUESTS, LENGTHS, indices, SCALE, C, "plain"


@pytest.mark.parametrize("indices", [None, INDICES])
def test_equals_loops(indices: Tensor | None) -> None:
    iq, iw, keys, q, cache, *_ = arguments(indices)
    got = ops.indexer_kl.reference(*arguments(indices))
    for t, (request, length) in enumerate(zip(REQUESTS.tolist(), LENGTHS.tolist(), strict=True)):
        positions = list(range(length)) if indices is None else [p for p in indices[t, 0].tolist() if p >= 0]
        if request < 0 or not positions:
            assert float(got[t]) == 0
            continue
        target = [0.0] * len(positions)
        for h in range(H):
            p = [math.exp(SCALE * dot(q[t, h].tolist(), key_at(cache, TABLE, request, s))) for s in positions]
            target = [a + b / math.fsum(p) / H for a, b in zip(target, p, strict=True)]
        scores = [index_score(iq[t].tolist(), iw[t].tolist(), key_at(keys, TABLE, request, s)) for s in positions]
        total = math.log(math.fsum(math.exp(s) for s in scores))
        want = math.fsum(a * (math.log(a) - s + total) for a, s in zip(target, scores, strict=True))
        assert abs(float(got[t]) - want) < 1e-12
        assert want >= 0


def test_is_zero_where_the_indexer_is_right() -> None:
    # One head everywhere, index keys = keys, all products positive: softmax of the scores is the attention itself.
    keys, q = normal(1, 6, C + R, seed=6).abs(), normal(1, 1, C + R, seed=7).abs()
    _, lse = ops.flash_mla.reference(q, keys, i32([[0]]), i32([0]), i32([6]), 1.0, C)
    loss = ops.indexer_kl.reference(
        q, torch.ones(1, 1).double(), keys, q, keys, lse, i32([[0]]), i32([0]), i32([6]), None, 1.0, C
    )
    assert abs(float(loss)) < 1e-14


def test_a_full_lse_weighs_heads_by_what_they_give_the_selection() -> None:
    given = list(arguments(INDICES))
    given[5] = arguments(None)[5]  # lse over every key: each head's share of the selection is its own
    iq, iw, keys, q, cache, lse = given[:6]
    got = float(ops.indexer_kl.reference(*given)[0])
    request, positions = 1, INDICES[0, 0].tolist()
    rows = [key_at(cache, TABLE, request, s) for s in positions]
    mass = [math.fsum(math.exp(SCALE * dot(q[0, h].tolist(), k) - float(lse[0, h])) for h in range(H)) for k in rows]
    target = [m / math.fsum(mass) for m in mass]
    scores = [index_score(iq[0].tolist(), iw[0].tolist(), key_at(keys, TABLE, request, s)) for s in positions]
    total = math.log(math.fsum(math.exp(s) for s in scores))
    assert abs(got - math.fsum(a * (math.log(a) - s + total) for a, s in zip(target, scores, strict=True))) < 1e-12


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    module = importlib.import_module("glm5sdk.ops.indexer.indexer_kl")
    groups = module.key_groups
    want = ops.indexer_kl.reference(*arguments(None))
    monkeypatch.setattr(module, "key_groups", lambda *a, **k: groups(*a, **{**k, "budget": 1}))
    torch.testing.assert_close(ops.indexer_kl.reference(*arguments(None)), want, rtol=1e-13, atol=1e-15)


def test_selection_beyond_the_length_is_refused() -> None:
    given = list(arguments(INDICES))
    given[8] = i32([5, 4, 3, 0, 5])
    with pytest.raises(ContractError, match=r"indices\[0, 0, 3\] is 5"):
        ops.indexer_kl.reference(*given)


@pytest.mark.parametrize("indices", [None, INDICES])
def test_page_outside_the_pool_is_refused(indices: Tensor | None) -> None:
    given = list(arguments(indices))
    given[6] = i32([[4, 5], [0, 3]])
    with pytest.raises(ContractError, match="the page of a key.* is 5, needs 0 <= value < 5"):
        ops.indexer_kl.reference(*given)


@pytest.mark.parametrize("indices", [None, INDICES])
def test_gradients_reach_the_indexer_alone(indices: Tensor | None) -> None:
    given = arguments(indices)
    check_backward(ops.indexer_kl, *given)

    def loss(iq: Tensor, iw: Tensor, keys: Tensor) -> Tensor:
        return ops.indexer_kl.reference(iq, iw, keys, *given[3:])

    assert torch.autograd.gradcheck(loss, tuple(t.requires_grad_() for t in given[:3]))
    leaves = [leaf(*t.shape, seed=i) for i, t in enumerate(given[:5])]
    rest = [given[5].float(), *given[6:]]
    out = ops.indexer_kl(*leaves, *rest)
    out.sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in leaves[:3])
    assert all(t.grad is None or (t.grad == 0).all() for t in leaves[3:])


def test_torch_view() -> None:
    given = arguments(INDICES)
    leaves = [leaf(*t.shape, seed=i) for i, t in enumerate(given[:3])]
    floats = [t.float() for t in given[3:6]]
    opcheck(ops.indexer_kl, *leaves, *floats, *given[6:])
