"""Bring expert rows back to their tokens, weighted and summed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glm5sdk.core.errors import ContractError
from glm5sdk.ops._math import accumulator
from glm5sdk.ops.moe._sort import absent_ids, sorted_slots, weighted_sum
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    t, a, n = axes["T"], axes["A"], axes["N"]
    return Cost(2 * t * a * n, size * t * a * n + 8 * t * a, size * t * n)


def make_inputs(axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool) -> dict[str, Any]:
    """row_ids as `moe_permute` makes them."""
    t, a = axes["T"], axes["A"]
    order, offsets = sorted_slots("moe_unpermute", absent_ids(t, a, a + 3, generator), a + 3)
    order[int(offsets[-1]) :] = -1
    return {"row_ids": order.to(torch.int32)}


def rows_of(row_ids: Tensor, tokens: int, slots: int) -> Tensor:
    """Row of each slot, i64 [T, A], -1 = none; checked."""
    flat = row_ids.to(torch.int64)
    present = flat >= 0
    used = flat[present]
    if bool(((flat < -1) | (flat >= tokens * slots)).any()) or used.unique().numel() != used.numel():
        shown = ", ".join(map(str, flat[:16].tolist())) + (", ..." if len(flat) > 16 else "")
        raise ContractError(f"moe_unpermute: row_ids is [{shown}], needs distinct slots below {tokens * slots}, or -1")
    place = torch.full_like(flat, -1)
    place[used] = present.nonzero()[:, 0]
    return place.view(tokens, slots)


def backward(grad_y: Tensor, rows: Tensor, row_ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """drow = weight * dy, dweight = row . dy."""
    acc = accumulator(rows.dtype)
    present = (row_ids >= 0).nonzero()[:, 0]
    slot = row_ids[present].to(torch.int64)
    g = grad_y[slot // max(1, weights.shape[1])].to(acc)
    d_rows, d_weights = torch.zeros_like(rows), torch.zeros_like(weights).reshape(-1)
    d_rows[present] = (g * weights.reshape(-1)[slot, None].to(acc)).to(rows.dtype)
    d_weights[slot] = (g * rows[present].to(acc)).sum(-1).to(weights.dtype)
    return d_rows, d_weights.view_as(weights)


@op(
    inputs={"rows": "a[T*A, N]", "row_ids": "i32[T*A]", "weights": "f32[T, A]"},
    outputs={"y": "a[T, N]"},
    rows=None,
    grad=("rows", "weights"),
    backward=backward,
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        geometries=(
            {"T": 0, "A": 2, "N": 7},
            {"T": 63, "A": 1, "N": 20},
            {"T": 64, "A": 3, "N": 65},
            {"T": 65, "A": 8, "N": 12},
            {"T": 2, "A": 8, "N": 6144},
        ),
    ),
)
def moe_unpermute(rows: Tensor, row_ids: Tensor, weights: Tensor) -> Tensor:
    """y[t] = sum over t's rows of weight * row, in the order of rows, which is ascending expert id; rounded once.

    Args:
        rows: [T*A, N], sorted by expert as `moe_permute` gives them.
        row_ids: i32 [T*A] flat slot `t * A + j` of each row, -1 = no row.
        weights: f32 [T, A] weight of each slot; those of absent slots are not read.

    Returns:
        y [T, N], dtype of rows; a token without rows gets 0. T = 0 is legal.

    Raises:
        ContractError: row_ids are no distinct slots; shapes, dtypes or devices do not fit.
    """
    place = rows_of(row_ids, *weights.shape)
    return weighted_sum(rows, place, place, weights)
