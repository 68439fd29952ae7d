"""Lockstep: engines whose experts are spread over processes take every step together."""

from __future__ import annotations

import time

from glm5sdk.parallel import ProcessGroup

__all__ = ["Lockstep"]

IDLE_SECONDS = 0.002  # when nobody has anything to compute


class Lockstep:
    """Agrees with the other processes of an expert group on how many forward passes the next step has.

    A process without work of its own runs the same passes without tokens: its experts are needed by the others, and a
    collective that one of them misses would never end.

    Args:
        group: the processes.

    Attributes:
        closing: this process wants to leave; it goes on taking part until all want to.
        ended: all have left; there will be no more steps.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.closing = self.ended = False

    def passes(self, own: int) -> int:
        """The largest number of passes that any process has; 0, after a short rest, when all are idle."""
        # 0 is said by those who want to leave, 1 by the idle, more by those with passes.
        most = self.group.largest(0 if self.closing and not own else own + 1)
        self.ended = most == 0
        if most == 1:
            time.sleep(IDLE_SECONDS)
        return max(0, most - 1)
