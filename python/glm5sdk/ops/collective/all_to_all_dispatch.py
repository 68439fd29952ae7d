"""Send each token's row to the ranks that own its experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from glm5sdk.core.errors import CapacityError, ContractError
from glm5sdk.ops.collective._exchange import exchange, gather_plans, members
from glm5sdk.ops.moe._sort import absent_ids
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    slots, n = axes["T"] * axes["A"], axes["N"]
    return Cost(0, size * axes["T"] * n + 8 * slots, size * slots * n + 16 * slots)


def make_inputs(axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool) -> dict[str, Any]:
    """One process, room for every slot."""
    ids = absent_ids(axes["T"], axes["A"], axes["E"], generator)
    return {"ids": ids, "local_experts": axes["E"], "group": "", "capacity": axes["Cap"]}


def agree(plans: list[list[int]]) -> None:
    """Raise the same error on every rank if any of them cannot take part.

    Args:
        plans: per rank: rows for each rank, its capacity, its first wrong expert id or -1.
    """
    world = len(plans)
    for rank, plan in enumerate(plans):
        if plan[world + 1] != -1:
            raise ContractError(
                f"all_to_all_dispatch: an expert id on rank {rank} is {plan[world + 1]}, needs -1 or a global expert id"
            )
    arriving = [sum(plan[rank] for plan in plans) for rank in range(world)]
    over = [(r, arriving[r], plans[r][world]) for r in range(world) if arriving[r] > plans[r][world]]
    if over:
        said = "; ".join(f"capacity of rank {rank} is {capacity}, needs {rows} rows" for rank, rows, capacity in over)
        raise CapacityError(f"all_to_all_dispatch: {said}. Raise capacity or send fewer tokens a step")


@op(
    inputs={
        "x": "a[T, N]", "ids": "i32[T, A]", "weights": "f32[T, A]", "local_experts": "= E", "capacity": "= Cap",
    },
    outputs={
        "rows": "a[Cap, N]", "row_ids": "i32[Cap]", "row_weights": "f32[Cap]", "recv_counts": "i32[E]",
        "handle": "i32[2*T*A+Cap]",
    },
    rows=None,
    where=("E > 0",),
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        ranges={"Cap": (81, 90)},
        geometries=({"T": 0, "A": 2, "N": 7, "E": 4, "Cap": 3}, {"T": 65, "A": 8, "N": 12, "E": 16, "Cap": 520}),
        exact_outputs=("rows", "row_ids", "row_weights", "recv_counts", "handle"),
    ),
)  # fmt: skip
def all_to_all_dispatch(
    x: Tensor, ids: Tensor, weights: Tensor, local_experts: int, group: str, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Send one row per (token, slot) to the rank that owns its expert: expert e lives on rank e // local_experts.

    Rows arrive ordered by (source rank, token, slot). Each is ready for
    `moe_experts(rows, row_ids[:, None], ones, ...)` with the local experts, and `all_to_all_combine` brings the results
    home. Every rank of the group calls together; whether all can take part is decided from everybody's numbers, so an
    error is raised on every rank and none is left waiting.

    Args:
        x: [T, N] this rank's tokens; T may differ between ranks.
        ids: i32 [T, A] global expert ids, -1 = none.
        weights: f32 [T, A] route weights, which travel along.
        local_experts: experts of each rank; there are local_experts * ranks in all.
        group: group_name of a torch.distributed process group; "" = this process alone.
        capacity: rows that this rank can take.

    Returns:
        rows [capacity, N]; row_ids i32 [capacity]: local expert of each row, -1 past the last; row_weights f32
        [capacity]; recv_counts i32 [local_experts]: rows of each local expert; handle i32 [2*T*A + capacity]: what
        `all_to_all_combine` needs, otherwise opaque. Rows past the last arrival hold nothing and are never read.

    Raises:
        CapacityError: on every rank, when more rows would arrive somewhere than that rank's capacity; with the numbers.
        ContractError: on every rank for a wrong id; on this one for shapes, dtypes, devices, the group's name, or,
            later, when a gradient is asked for: a transport has none here.

    Source: the meaning of DeepEP's `dispatch`, with one row per slot so that its owner can sum in expert order.
    """
    process_group, rank, world = members("all_to_all_dispatch", group)
    flat = ids.reshape(-1).to(torch.int64)
    wrong = flat[(flat < -1) | (flat >= local_experts * world)]
    target = torch.where(flat < 0, -1, flat // local_experts)
    counts = torch.bincount(target.clamp(-1, world - 1) + 1, minlength=world + 1)[1:]
    plan = torch.cat((counts, counts.new_tensor([capacity, int(wrong[0]) if len(wrong) else -1])))
    plans = gather_plans(plan, process_group, world)
    agree(plans)
    sent, received = plans[rank][:world], [plan[rank] for plan in plans]
    count = sum(received)
    # Stable, and absent slots first, so that the last sum(sent) are ordered by (rank, slot).
    order = target.argsort(stable=True)[len(flat) - sum(sent) :]

    def arrive(values: Tensor, fill: float) -> Tensor:
        got = exchange(values, sent, received, process_group)
        out = got.new_full((capacity, *got.shape[1:]), fill)
        out[:count] = got
        return out

    rows = arrive(x[order // max(1, ids.shape[1])], 0)
    row_ids = arrive((flat[order] % local_experts).to(torch.int32), -1)
    row_weights = arrive(weights.reshape(-1)[order], 0)
    recv_counts = torch.bincount(row_ids[:count].to(torch.int64), minlength=local_experts).to(torch.int32)
    source = torch.arange(world, device=x.device).repeat_interleave(torch.tensor(received, device=x.device))
    handle = torch.cat((target, flat, pad(source, (0, capacity - count), value=-1))).to(torch.int32)
    return rows, row_ids, row_weights, recv_counts, handle
