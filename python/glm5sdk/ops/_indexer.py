"""What the indexer's references and their test rules share: selection, and the judgement of a selection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glm5sdk.ops._cache import key_groups, read_index_rows
from glm5sdk.ops._checks import check_range
from glm5sdk.ops._math import accumulate, accumulator
from glm5sdk.ops._mla import index_scores
from glm5sdk.ops._test_inputs import draw, index_cache_inputs, page_inputs
from glm5sdk.registry import Cost
from glm5sdk.registry.formats import page_size_of

__all__ = ["TOPK_GEOMETRIES", "TOPK_INPUTS", "compare_selection", "select_keys", "topk_cost", "topk_inputs"]

TOPK_INPUTS = {
    "iq": "a[T, Hi, Di]",
    "iw": "f32[T, Hi]",
    "index_cache": "index_cache[P, S, Di]",
    "block_table": "i32[B, M]",
    "request_ids": "i32[T]",
    "kv_lens": "i32[T]",
    "topk": "= K",
}

TOPK_GEOMETRIES = (
    {"T": 2, "Hi": 32, "Di": 128, "B": 2, "M": 3, "P": 7, "S": 64, "K": 64},
    {"T": 5, "Hi": 3, "Di": 20, "B": 2, "M": 9, "P": 20, "S": 7, "K": 63},
    {"T": 5, "Hi": 1, "Di": 5, "B": 3, "M": 64, "P": 200, "S": 1, "K": 2048},
    {"T": 4, "Hi": 2, "Di": 16, "B": 2, "M": 13, "P": 26, "S": 5, "K": 1},
    {"T": 0, "Hi": 2, "Di": 4, "B": 1, "M": 1, "P": 1, "S": 2, "K": 2},
)


def topk_cost(axes: Mapping[str, int], size: int) -> Cost:
    """An upper bound: every row scores all its request's pages, and a request's rows share one pass over them."""
    rows, heads, dim = axes["T"], axes["Hi"], axes["Di"]
    keys = axes["M"] * axes["S"]
    read = size * (rows * heads * dim + min(axes["B"], rows) * keys * dim) + 4 * rows * heads
    return Cost(2 * rows * heads * keys * (dim + 1), read, 4 * rows * axes["K"])


def topk_inputs(
    axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool, format: str | None = None
) -> dict[str, Any]:
    """Inputs of both selection ops; `exact` ones are full of equal scores."""
    cache = index_cache_inputs(axes, dtype, generator, exact, format)
    paged = page_inputs(axes, generator)
    weights = draw((axes["T"], axes["Hi"]), accumulator(dtype), generator, exact)
    return {**cache, **paged, "iw": weights, "max_kv_len": axes["M"] * axes["S"]}


def select_keys(
    op: str,
    iq: Tensor,
    iw: Tensor,
    index_cache: Tensor,
    block_table: Tensor,
    request_ids: Tensor,
    kv_lens: Tensor,
    topk: int,
    max_kv_len: int,
    format: str,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor]:
    """The best `topk` keys of every row and their scores; arguments as `topk_indexer_with_scores`.

    Returns:
        indices i32 [T, 1, K] ascending, then -1; scores [T, 1, K] in the accumulator dtype, -inf where absent.
    """
    rows, heads, dim = iq.shape
    acc = accumulator(iq.dtype)
    check_range(op, "kv_lens", torch.where(request_ids >= 0, kv_lens, 0), 0, max_kv_len + 1, "max_kv_len, plus 1")
    indices = torch.full((rows, 1, topk), -1, dtype=torch.int32, device=iq.device)
    scores = torch.full((rows, 1, topk), -torch.inf, dtype=acc, device=iq.device)
    size = page_size_of("index_cache", format, tuple(index_cache.shape), dim)
    # Per row and key: a term per head and its relu, the running sum twice, and what sorting needs.
    width = (2 * heads + 6) * iq.new_empty(0, dtype=acc).element_size()
    groups = key_groups(
        op, block_table, request_ids, index_cache.shape[0], size, kv_lens=kv_lens, width=width, budget=workspace_bytes
    )
    for group in groups:
        keys = read_index_rows(index_cache, group.slots, dim, format, acc)
        found = index_scores(accumulate(iq[group.rows]), iw[group.rows].to(acc), keys)
        found = torch.where(found.isnan(), -torch.inf, found) + 0.0  # NaN sorts last, -0 becomes +0
        found = found.masked_fill(~group.visible[:, 0], -torch.inf)
        # Invisible keys come after visible ones at equal score, -inf, because they lie later and the sort is stable.
        order = found.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
        absent = order >= kv_lens[group.rows][:, None]
        chosen = torch.where(absent, len(keys), order).sort(dim=-1).values
        absent = chosen == len(keys)
        chosen = chosen.clamp_max(len(keys) - 1)
        width_found = chosen.shape[1]
        indices[group.rows, 0, :width_found] = torch.where(absent, -1, chosen).int()
        scores[group.rows, 0, :width_found] = found.gather(-1, chosen).masked_fill(absent, -torch.inf)
    return indices, scores


def compare_selection(
    arguments: Mapping[str, Any], got: tuple[Tensor, ...], want64: tuple[Tensor, ...], tolerance: float
) -> None:
    """Judge a selection on inputs whose scores an implementation may round its own way.

    Args:
        arguments: of the call, by name.
        got: indices [T, 1, K], and scores when the op returns them.
        want64: the float64 reference's outputs; only their number matters, since near ties may fall either way.
        tolerance: error a score may have, relative to the row's largest term or absolute below 1.

    Raises:
        AssertionError: the selection is malformed, takes a key clearly below the K-th best or leaves one clearly above.
    """
    indices = got[0][:, 0].long()
    topk = indices.shape[1]
    lengths = torch.where(arguments["request_ids"] >= 0, arguments["kv_lens"], 0).tolist()
    exact = _scores64(arguments)
    for row, length in enumerate(lengths):
        count = min(topk, length)
        chosen = indices[row, :count]
        assert (indices[row, count:] == -1).all(), f"row {row}: entries past {count} are not -1"
        assert ((chosen >= 0) & (chosen < length)).all(), f"row {row}: a position is outside [0, {length})"
        assert (chosen[1:] > chosen[:-1]).all(), f"row {row}: positions do not ascend"
        if count == 0:
            continue
        score = exact[row, :length]
        slack = 2 * tolerance * max(1.0, float(score.abs().max()))
        kth = score.sort(descending=True).values[count - 1]
        left = torch.ones(length, dtype=torch.bool).index_fill(0, chosen, False)
        assert (score[chosen] >= kth - slack).all(), f"row {row}: chose a key below the K-th best"
        assert (score[left] <= kth + slack).all(), f"row {row}: left a key above the K-th best"
        if len(got) > 1:
            error = (got[1][row, 0, :count].double() - score[chosen]).abs()
            assert (error <= slack).all(), f"row {row}: a score is off by {float(error.max())}"


def _scores64(arguments: Mapping[str, Any]) -> Tensor:
    """Every row's scores over its own request in float64 [T, M * S], -inf where it sees nothing."""
    iq, cache, format = arguments["iq"].double(), arguments["index_cache"], arguments.get("format", "plain")
    table = arguments["block_table"]
    dim = iq.shape[-1]
    size = page_size_of("index_cache", format, tuple(cache.shape), dim)
    result = torch.full((len(iq), table.shape[1] * size), -torch.inf, dtype=torch.float64)
    groups = key_groups("compare", table, arguments["request_ids"], cache.shape[0], size, kv_lens=arguments["kv_lens"])
    for group in groups:
        keys = read_index_rows(cache, group.slots, dim, format, torch.float64)
        result[group.rows, : len(keys)] = index_scores(iq[group.rows], arguments["iw"][group.rows].double(), keys)
    return result
