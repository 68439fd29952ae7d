"""SchedulingPolicy: who goes first, who yields, and how the tokens of a step are shared out."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, Protocol

from glm5sdk.serve.sequence import Sequence

__all__ = ["DecodeFirst", "SchedulingPolicy"]


class SchedulingPolicy(Protocol):
    """Every choice of the scheduler that is a matter of taste. None of them changes a token."""

    def rank(self, sequence: Sequence) -> Any:
        """A sort key: lower is served first, and the highest yields its pages first."""
        ...

    def share(self, wanted: int, budget: int, taken: int, chunked: bool) -> int:
        """How many of the `wanted` rows a sequence gets.

        Args:
            wanted: rows it could use now.
            budget: rows left in this step.
            taken: rows given to others already.
            chunked: whether a prompt may be read in parts.

        Returns:
            0 to wanted.
        """
        ...

    def order(self, running: Many[Sequence]) -> list[Sequence]:
        """The order in which running sequences get their rows."""
        ...


class DecodeFirst:
    """By priority, then by arrival; sequences that write come before prompts that are read.

    So a long prompt delays the tokens of others by one chunk at most.
    """

    def rank(self, sequence: Sequence) -> Any:
        return sequence.priority, sequence.arrival, sequence.index

    def share(self, wanted: int, budget: int, taken: int, chunked: bool) -> int:
        if wanted <= budget:
            return wanted
        if chunked:
            return budget
        return 0 if taken else wanted  # a prompt that is read whole has a step of its own

    def order(self, running: Many[Sequence]) -> list[Sequence]:
        return sorted(running, key=lambda s: (s.length - s.planned > 1, self.rank(s)))
