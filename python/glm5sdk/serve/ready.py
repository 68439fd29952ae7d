"""What a server and the supervisor that started it say to each other: by environment and one file descriptor."""

from __future__ import annotations

import os
from typing import NamedTuple

from glm5sdk.core.errors import ContractError

__all__ = ["EP_MEETING", "EP_RANK", "EP_SIZE", "READY_FD", "ExpertGroup", "announce", "expert_group"]

READY_FD = "GLM5SDK_READY_FD"
EP_RANK, EP_SIZE, EP_MEETING = "GLM5SDK_EP_RANK", "GLM5SDK_EP_SIZE", "GLM5SDK_EP_MEETING"


class ExpertGroup(NamedTuple):
    """The processes over which this server's experts are spread; the first fields of `load.ExpertSpread`.

    Attributes:
        rank: of this process.
        size: how many there are.
        meeting: where they find each other.
    """

    rank: int
    size: int
    meeting: str


def expert_group() -> ExpertGroup | None:
    """The group that the environment puts this process into; None when it is alone.

    Raises:
        ContractError: the variables do not fit together.
    """
    if EP_SIZE not in os.environ:
        return None
    values = [os.environ.get(name, "") for name in (EP_RANK, EP_SIZE, EP_MEETING)]
    rank, size, meeting = values
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size) and meeting):
        names = f"{EP_RANK}, {EP_SIZE}, {EP_MEETING}"
        raise ContractError(f"serve: {names} are {values}, needs a rank under a size, and a place to meet")
    return ExpertGroup(int(rank), int(size), meeting)


def announce(url: str) -> bool:
    """Tell who started this process that it serves at this URL. False when nobody asked."""
    descriptor = os.environ.pop(READY_FD, "")
    if not descriptor.isdecimal():
        return False
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as pipe:
        pipe.write(url + "\n")
    return True
