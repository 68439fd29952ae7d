"""Leases: pages pinned for somebody outside the engine, for a while."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from glm5sdk.core.errors import ContractError
from glm5sdk.serve.pages import PagePool

__all__ = ["Leases"]

LONGEST_SECONDS = 600.0


class Leases:
    """Who borrows a page says for how long; when the time is over it is free again, whatever became of the borrower.

    Args:
        pages: the pool.
        clock: seconds, monotonic.
    """

    def __init__(self, pages: PagePool, clock: Callable[[], float]) -> None:
        self._pages, self._clock = pages, clock
        self._held: dict[str, tuple[list[int], float]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def grant(self, pages: Sequence[int], seconds: float) -> str:
        """Take over a reference on each page that the caller holds; the lease's name.

        Raises:
            ContractError: seconds is not over 0 and at most LONGEST_SECONDS.
        """
        deadline = self._clock() + _checked(seconds)
        name = secrets.token_hex(16)
        self._held[name] = list(pages), deadline
        return name

    def renew(self, name: str, seconds: float) -> bool:
        """Let it last from now on for so many seconds. False when there is no such lease any more."""
        seconds = _checked(seconds)
        self.expire()
        if name not in self._held:
            return False
        self._held[name] = self._held[name][0], self._clock() + seconds
        return True

    def release(self, name: str) -> bool:
        """End it. False when it had ended already, which is no error: messages come twice."""
        pages, _ = self._held.pop(name, ([], 0.0))
        self._pages.release(pages)
        return bool(pages)

    def expire(self) -> int:
        """Free what has run out; how many leases that were."""
        now = self._clock()
        over = [name for name, (_, deadline) in self._held.items() if deadline <= now]
        for name in over:
            self.release(name)
        return len(over)


def _checked(seconds: float) -> float:
    if not 0 < seconds <= LONGEST_SECONDS:
        raise ContractError(f"lease: seconds is {seconds}, needs over 0 and at most {LONGEST_SECONDS}")
    return seconds
