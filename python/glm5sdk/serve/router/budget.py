"""RetryBudget: retries are a share of the traffic, so that a failing fleet is not hit twice as hard."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from glm5sdk.core.errors import ContractError

__all__ = ["RetryBudget"]


class RetryBudget:
    """Each request deposits a part of a retry; a few a second are free, so that a quiet router can retry at all."""

    def __init__(
        self,
        ratio: float = 0.2,
        per_second: float = 1.0,
        most: float = 20.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Start full.

        Args:
            ratio: retries that one request pays for.
            per_second: retries that time pays for.
            most: retries that can be saved up.
            clock: seconds.
        """
        for name, value in (("ratio", ratio), ("per_second", per_second), ("most", most)):
            if not value >= 0.0:
                raise ContractError(f"retry budget: {name} is {value}, needs at least 0")
        self.ratio, self.per_second, self.most = ratio, per_second, most
        self._clock, self._then, self._saved = clock, clock(), most

    def deposit(self) -> None:
        """A request came."""
        self._saved = min(self.most, self._saved + self.ratio)

    def withdraw(self) -> bool:
        """Whether one more retry is paid for; if so it is spent."""
        now = self._clock()
        self._saved = min(self.most, self._saved + (now - self._then) * self.per_second)
        self._then = now
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True
