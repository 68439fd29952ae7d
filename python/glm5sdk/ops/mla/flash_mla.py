"""Attention of each token over all keys it may see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glm5sdk.ops._cache import key_groups, read_kv_rows
from glm5sdk.ops._math import accumulate, accumulator
from glm5sdk.ops._mla import attend, attention_backward, gradient_sum, place_rows
from glm5sdk.ops._test_inputs import SCALE, empty_rows_are_empty, kv_cache_inputs, page_inputs
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    rows, heads = axes["T"], axes["H"]
    row, keys = axes["C"] + axes["R"], axes["M"] * axes["S"]
    # An upper bound: every row sees all its request's pages, and a request's rows share one pass over them.
    read = size * (rows * heads * row + min(axes["B"], rows) * keys * row)
    return Cost(2 * rows * heads * keys * (row + axes["C"]), read, rows * heads * (size * axes["C"] + 4))


def make_inputs(
    axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool, format: str | None = None
) -> dict[str, Any]:
    return {
        **kv_cache_inputs(axes, dtype, generator, exact, format),
        **page_inputs(axes, generator),
        "scale": SCALE,
    }


def backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    request_ids: Tensor,
    kv_lens: Tensor,
    scale: float,
    v_dim: int,
    format: str,
) -> tuple[Tensor, Tensor]:
    """Group by group, nothing kept but one group's scores; see `attention_backward`."""
    pages, size = kv_cache.shape[:2]
    groups = key_groups("flash_mla_bwd", block_table, request_ids, pages, size, kv_lens=kv_lens, width=q.shape[1])
    return attention_backward(groups, grad_out, grad_lse, q, kv_cache, scale, v_dim, format)


@op(
    inputs={
        "q": "a[T, H, C+R]",
        "kv_cache": "kv_cache[P, S, C, R]",
        "block_table": "i32[B, M]",
        "request_ids": "i32[T]",
        "kv_lens": "i32[T]",
        "v_dim": "= C",
    },
    outputs={"out": "a[T, H, C]", "lse": "f32[T, H]"},
    rows="T",
    grad=("q", "kv_cache"),
    backward=backward,
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        properties=(empty_rows_are_empty,),
        ranges={"P": (1, 5)},
        geometries=(
            {"T": 2, "H": 64, "C": 512, "R": 64, "B": 2, "M": 3, "P": 7, "S": 64},
            {"T": 5, "H": 3, "C": 20, "R": 12, "B": 2, "M": 9, "P": 20, "S": 7},
            {"T": 5, "H": 3, "C": 5, "R": 2, "B": 3, "M": 64, "P": 200, "S": 1},
            {"T": 4, "H": 2, "C": 16, "R": 4, "B": 2, "M": 13, "P": 26, "S": 5},
            {"T": 0, "H": 2, "C": 4, "R": 2, "B": 1, "M": 1, "P": 1, "S": 2},
        ),
    ),
)
def flash_mla(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    request_ids: Tensor,
    kv_lens: Tensor,
    scale: float,
    v_dim: int,
    format: str = "plain",
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the first `kv_lens` keys of each row's request in a paged latent cache.

    Bit-equal to `sparse_flash_attention` given all those positions.

    Args:
        q: [T, H, C + R] absorbed queries.
        kv_cache: one row per token; see `concat_and_cache_mla` for the formats.
        block_table: [B, M] i32, physical page of each logical page.
        request_ids: [T] i32; -1 = padding row.
        kv_lens: [T] i32, how many keys the row sees (its position + 1 when causal).
        scale: on the scores; (Dn + R)^-0.5 in GLM-5, which is not (C + R)^-0.5.
        v_dim: C, the columns of a row that are values.
        format: of the cache.

    Returns:
        out [T, H, C], dtype of q; lse [T, H] f32, natural log. A padding row, or one without keys, is 0 and -inf.
        Rows are independent. Gradients: q, and kv_cache when it is `plain`.

    Raises:
        ContractError: shapes or dtypes do not fit; a request, length or page is out of range.

    Source: DeepSeek-V2's multi-head latent attention, arXiv 2405.04434, in absorbed form.
    """
    acc = accumulator(q.dtype)
    cache = gradient_sum(kv_cache)
    outs, sums = [], []
    pages, size = kv_cache.shape[:2]
    for group in key_groups("flash_mla", block_table, request_ids, pages, size, kv_lens=kv_lens, width=q.shape[1]):
        keys = read_kv_rows(cache, group.slots, v_dim, format, acc)
        out, lse = attend(accumulate(q.index_select(0, group.rows)), keys, group.visible, scale, v_dim)
        outs.append((group, out))
        sums.append((group, lse))
    return (
        place_rows(outs, q.new_empty(*q.shape[:2], v_dim), 0.0),
        place_rows(sums, q.new_empty(*q.shape[:2], dtype=acc), -torch.inf),
    )
