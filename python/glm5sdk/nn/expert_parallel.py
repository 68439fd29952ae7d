"""Experts spread over processes: rows travel to their experts and back, and the sum stays with the token's owner."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glm5sdk.core.errors import ContractError
from glm5sdk.nn.moe import Experts
from glm5sdk.nn.routed import routed_rows
from glm5sdk.parallel import ProcessGroup

__all__ = ["ParallelExperts"]


class ParallelExperts(Experts):
    """This process's share of a layer's experts; the bits are those of all experts in one process.

    All processes of the group run every step together, also those that have no tokens in it (T = 0). Inference only:
    rows that travelled have no gradient.

    Args:
        experts: of the whole layer, a multiple of the group's size.
        intermediate, hidden: I, N.
        limit: clamp before SwiGLU, or None.
        group: over which experts are spread.
        capacity: rows that this process takes in a step; when more would come, every process of the group raises
            CapacityError with the numbers. None makes room for the worst case of each step, at the price of one more
            exchange of a number.
    """

    whole = False

    def __init__(
        self,
        experts: int,
        intermediate: int,
        hidden: int,
        limit: float | None,
        group: ProcessGroup,
        capacity: int | None = None,
    ) -> None:
        nn.Module.__init__(self)
        own = group.share(experts, "number of routed experts")
        if capacity is not None and capacity < 1:
            raise ContractError(f"expert parallel: capacity is {capacity}, needs at least 1 row, or None")
        self.first, self.limit, self.group, self.capacity = own.start, limit, group, capacity
        self.gate_up_proj = nn.Parameter(torch.empty(len(own), 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(len(own), hidden, intermediate))

    def forward(self, x_TN: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """As `Experts`, for this process's tokens.

        Raises:
            CapacityError: on every process, when too many rows would arrive at one.
            ContractError: an adapter for experts is active.
        """
        if self.adapter is not None:
            raise ContractError("expert parallel: an adapter adds to experts, needs them in one process; merge it")
        room = self.capacity
        if room is None:  # a token has no expert twice
            room = self.group.total(x_TN.shape[0]) * min(ids_TA.shape[1], self.count)
        return routed_rows(x_TN, ids_TA, weights_TA, self.count, self._run_patched, self.group.name, max(room, 1))
