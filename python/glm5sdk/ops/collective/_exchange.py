"""Groups by name, and the one exchange of rows that both directions use."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm5sdk.core.errors import ContractError

__all__ = ["exchange", "gather_plans", "members"]


def members(op: str, group: str) -> tuple[Any, int, int]:
    """(process group or None, this process's rank in it, its size); "" is the world of this process alone.

    Raises:
        ContractError: there is no group of that name.
    """
    if group == "":
        return None, 0, 1
    try:
        found = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
    except (RuntimeError, ValueError, KeyError) as error:
        raise ContractError(
            f"{op}: group is {group!r}, needs the group_name of an initialised process group, or '' for one process"
        ) from error
    return found, dist.get_rank(found), dist.get_world_size(found)


def gather_plans(plan: Tensor, group: Any, world: int) -> list[list[int]]:
    """Every rank's vector of numbers, in the order of ranks, so that all ranks decide alike."""
    if group is None:
        return [plan.tolist()]
    plans = [torch.empty_like(plan) for _ in range(world)]
    dist.all_gather(plans, plan, group=group)
    return [p.tolist() for p in plans]


def exchange(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Send the first sent[0] rows to rank 0, the next sent[1] to rank 1, ...; what comes back is in the order of ranks.

    Args:
        rows: [sum(sent), ...], any dtype; travels as bytes, because not every transport knows every dtype.
        sent: rows for each rank.
        received: rows from each rank.
        group: process group, or None.

    Returns:
        [sum(received), ...].
    """
    if group is None:
        return rows
    packed = (rows[:, None] if rows.ndim == 1 else rows.flatten(1)).contiguous()
    result = packed.new_empty(sum(received), packed.shape[1])
    dist.all_to_all_single(result.view(torch.uint8), packed.view(torch.uint8), received, sent, group=group)
    return result.reshape(-1, *rows.shape[1:])
