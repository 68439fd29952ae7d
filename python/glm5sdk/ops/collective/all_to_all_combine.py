"""Bring expert rows home and sum them per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from glm5sdk.ops.collective._exchange import exchange, members
from glm5sdk.ops.moe._sort import absent_ids, weighted_sum
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    t, a, n = axes["T"], axes["A"], axes["N"]
    return Cost(2 * t * a * n, size * t * a * n + 12 * t * a, size * t * n)


def make_inputs(axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool) -> dict[str, Any]:
    """The handle that a dispatch inside one process leaves."""
    flat = absent_ids(axes["T"], axes["A"], axes["A"] + 3, generator).reshape(-1)
    target = torch.where(flat < 0, -1, 0)
    used = int((flat >= 0).sum())
    source = pad(torch.zeros(used, dtype=torch.int32), (0, axes["Cap"] - used), value=-1)
    return {"handle": torch.cat((target.to(torch.int32), flat, source)), "group": ""}


@op(
    inputs={"rows": "a[Cap, N]", "handle": "i32[2*T*A+Cap]", "weights": "f32[T, A]"},
    outputs={"y": "a[T, N]"},
    rows=None,
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        ranges={"Cap": (81, 90)},
        geometries=({"T": 0, "A": 2, "N": 7, "Cap": 3}, {"T": 65, "A": 8, "N": 12, "Cap": 520}),
    ),
)
def all_to_all_combine(rows: Tensor, handle: Tensor, weights: Tensor, group: str) -> Tensor:
    """y[t] = sum over t's slots of weight * row, after every row has come back to the rank that sent it.

    Rows travel one per (token, slot) and unweighted; the owner of a token multiplies and adds them in ascending expert
    id in the accumulator and rounds once, as `moe_experts` does. So expert parallelism does not change a bit of y.

    Args:
        rows: [capacity, N] results, in the order in which `all_to_all_dispatch` delivered the rows.
        handle: i32 [2*T*A + capacity] of that dispatch.
        weights: f32 [T, A] route weights of this rank's tokens.
        group: the group of that dispatch.

    Returns:
        y [T, N], dtype of rows; a token without experts gets 0.

    Raises:
        ContractError: shapes, dtypes, devices or the group's name do not fit; a gradient is asked for, later.

    Source: the meaning of DeepEP's `combine`.
    """
    process_group, _, world = members("all_to_all_combine", group)
    slots = weights.numel()
    target, ids, source = handle.to(torch.int64).split((slots, slots, rows.shape[0]))
    sent = torch.bincount(target + 1, minlength=world + 1)[1:].tolist()
    received = torch.bincount(source + 1, minlength=world + 1)[1:].tolist()
    home = exchange(rows[: sum(received)], received, sent, process_group)
    place = torch.full_like(target, -1)
    place[target.argsort(stable=True)[slots - len(home) :]] = torch.arange(len(home), device=rows.device)
    return weighted_sum(home, place.view_as(weights), ids.view_as(weights), weights)
