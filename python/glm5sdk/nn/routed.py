"""The mixture as rows: one row per (token, expert), computed where its expert's weights lie, summed in one order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from glm5sdk import ops
from glm5sdk.registry.weight import WeightLike

__all__ = ["Part", "routed_rows", "run_part", "run_parts"]

# (rows [C, N], expert of each row i32 [C], -1 past the last) -> results [C, N]; what is past the last is never read.
Run = Callable[[Tensor, Tensor], Tensor]


class Part(NamedTuple):
    """Weights of some experts.

    Attributes:
        place: i64 [E], where each expert lies in the weights, -1 for one that is not here.
        gate_up: [P, 2I, N].
        down: [P, N, I].
    """

    place: Tensor
    gate_up: WeightLike
    down: WeightLike


def routed_rows(
    x_TN: Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    local_experts: int,
    run: Run,
    group: str = "",
    capacity: int | None = None,
) -> Tensor:
    """The routed sum of each token, the same bits as `ops.moe_experts` with all weights in one place.

    Rows leave their token unweighted and are summed by its owner in ascending *global* expert id, in the accumulator,
    rounded once. So, on a backend whose rows do not know their batch, it does not matter where, in which order or in
    how many calls `run` computes them.

    Args:
        x_TN: activations.
        ids_TA: i32, global expert ids, -1 = none.
        weights_TA: route weights.
        local_experts: experts of this process; all of them when `group` is "".
        run: computes rows; ids it gets count from this process's first expert.
        group: name of the process group over which experts are spread, "" for none.
        capacity: rows that this process can take from the group; None stays within this process, whatever the group.

    Raises:
        CapacityError: on every process of the group, when more rows would arrive somewhere than that one's capacity.
    """
    if capacity is None:
        rows, row_ids, _ = ops.moe_permute(x_TN, ids_TA, local_experts)
        owners = torch.where(row_ids >= 0, ids_TA.reshape(-1)[row_ids.clamp(min=0)], -1)
        return ops.moe_unpermute(run(rows, owners), row_ids, weights_TA)
    rows, owners, _, _, handle = ops.all_to_all_dispatch(x_TN, ids_TA, weights_TA, local_experts, group, capacity)
    return ops.all_to_all_combine(run(rows, owners), handle, weights_TA, group)


def run_part(rows: Tensor, owners: Tensor, part: Part, limit: float | None, out: Tensor) -> None:
    """Compute the rows whose experts are in `part` and write them to their places in `out`.

    Args:
        rows: [C, N].
        owners: i32 [C], expert of each row, -1 = none.
        part: the weights at hand.
        limit: clamp before SwiGLU, or None.
        out: [C, N], written in place; other rows stay as they are.
    """
    place = torch.where(owners >= 0, part.place[owners.clamp(min=0).long()], -1)
    picked = (place >= 0).nonzero()[:, 0]
    if not len(picked):
        return
    one = torch.ones(len(picked), 1, dtype=_accumulator(rows.dtype), device=rows.device)
    slots = place[picked].to(torch.int32)[:, None]
    out[picked] = ops.moe_experts(rows[picked], slots, one, part.gate_up, part.down, limit)


def run_parts(rows: Tensor, owners: Tensor, parts: Sequence[Part], limit: float | None) -> Tensor:
    """Results [C, N] of all rows; each expert has to be in exactly one part."""
    out = torch.zeros_like(rows)
    for part in parts:
        run_part(rows, owners, part, limit, out)
    return out


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
