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
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def passes(self, own: int) -> int:
        """The largest number of passes that any process has; 0, after a short rest, when all are idle."""
        most = self.group.largest(own)
        if most == 0:
            time.sleep(IDLE_SECONDS)
        return most
