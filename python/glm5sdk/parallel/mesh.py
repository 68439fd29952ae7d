"""Process groups with names: everything above takes a group's name, nothing above makes a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from glm5sdk.core.errors import ContractError, UnavailableError

__all__ = ["Mesh", "ProcessGroup", "close_processes", "join_processes", "make_mesh"]

_TRANSPORT = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


@dataclass(frozen=True)
class ProcessGroup:
    """One group as this process sees it.

    Attributes:
        name: what the collective ops take; "" is this process alone.
        rank, size: this process's place in it, and how many there are.
        device: type of the device whose tensors travel in it.
    """

    name: str = ""
    rank: int = 0
    size: int = 1
    device: str = "cpu"

    def share(self, count: int, what: str) -> range:
        """This process's equal share of 0 .. count - 1, consecutive.

        Raises:
            ContractError: the group's size does not divide `count`.
        """
        if count % self.size:
            raise ContractError(f"parallel: {what} is {count}, needs a multiple of the group's {self.size} processes")
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def total(self, number: int) -> int:
        """Sum of every process's number; all of the group call together."""
        return self._reduced(number, dist.ReduceOp.SUM)

    def largest(self, number: int) -> int:
        """Largest of every process's number; all of the group call together."""
        return self._reduced(number, dist.ReduceOp.MAX)

    def _reduced(self, number: int, operation: dist.ReduceOp.RedOpType) -> int:
        if not self.name:
            return number
        group = dist.distributed_c10d._resolve_process_group(self.name)  # type: ignore[attr-defined, arg-type]
        value = torch.tensor([number], dtype=torch.int64, device=self.device)
        dist.all_reduce(value, operation, group=group)
        return int(value)


@dataclass(frozen=True)
class Mesh:
    """Processes laid out along named axes, the last one fastest.

    Attributes:
        sizes: length of each axis.
        groups: for each axis, the group of processes that differ from this one along it alone.
    """

    sizes: Mapping[str, int]
    groups: Mapping[str, ProcessGroup]

    def __getitem__(self, axis: str) -> ProcessGroup:
        if axis not in self.groups:
            raise ContractError(f"mesh: axis is {axis!r}, needs one of {', '.join(self.groups)}")
        return self.groups[axis]


def join_processes(
    rank: int, size: int, meeting: str, device: str = "cpu", timeout_s: float = 600.0, transport: str | None = None
) -> None:
    """Meet the other processes; the first collective call of a process.

    Args:
        rank: of this process, 0 <= rank < size.
        size: number of processes.
        meeting: where they find each other: "file://..." or "tcp://host:port", as torch.distributed takes it.
        device: type of device whose tensors travel: "cpu" (gloo), "cuda" (nccl), "npu" (hccl).
        timeout_s: seconds after which a collective that not everybody joined fails.
        transport: another of torch's backends than the device's own.

    Raises:
        ContractError: rank or device is not one of these. UnavailableError: torch was built without the transport.
    """
    if device not in _TRANSPORT:
        raise ContractError(f"parallel: device is {device!r}, needs one of {', '.join(_TRANSPORT)}")
    if not 0 <= rank < size:
        raise ContractError(f"parallel: rank is {rank}, needs 0 to {size - 1}")
    name = transport or _TRANSPORT[device]
    if not dist.is_available() or not dist.is_backend_available(name):
        raise UnavailableError(f"parallel: transport is {name!r}, needs a torch that was built with it")
    dist.init_process_group(name, init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))


def make_mesh(sizes: Mapping[str, int], device: str = "cpu") -> Mesh:
    """Lay all processes out along axes and make the groups of each axis; every process calls it with the same sizes.

    An axis of length 1 gets the group of this process alone, so a mesh of ones works without `join_processes`.

    Args:
        sizes: axis -> length, the last axis fastest: {"data": 2, "expert": 4} puts 0 to 3 in one expert group.
        device: type of device whose tensors travel.

    Raises:
        ContractError: the lengths do not multiply to the number of processes.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    me = dist.get_rank() if world > 1 else 0
    lengths = list(sizes.values())
    total = 1
    for length in lengths:
        total *= length
    if min(lengths, default=1) < 1 or total != world:
        raise ContractError(
            f"mesh: sizes are {dict(sizes)}, needs lengths whose product is {world}, the number of processes"
        )
    layout = torch.arange(total).view(lengths)
    groups: dict[str, ProcessGroup] = {}
    for axis, name in enumerate(sizes):
        if lengths[axis] == 1:
            groups[name] = ProcessGroup(device=device)
            continue
        # Every process makes every group, in the same order, as torch.distributed asks.
        for ranks in layout.movedim(axis, -1).reshape(-1, lengths[axis]).tolist():
            group = dist.new_group(ranks)
            if me in ranks:
                groups[name] = ProcessGroup(group.group_name, ranks.index(me), len(ranks), device)
    return Mesh(dict(sizes), groups)


def close_processes() -> None:
    """Leave all groups; harmless when there are none."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
