"""OwnerTable: which replica a session lives on; changed only by compare and swap."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from glm5sdk.core.errors import ContractError

__all__ = ["Owner", "OwnerTable"]


@dataclass(frozen=True)
class Owner:
    """The replica that owns a session, and how often that was decided."""

    replica: str
    version: int


class OwnerTable:
    """Each session has at most one owner. The least recently used sessions are forgotten, which only costs a cache.

    Versions grow over the whole table and are never used twice, so a swap that was planned before a session was
    forgotten and came back cannot succeed by accident.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ContractError(f"owner table: capacity is {capacity}, needs at least 1")
        self.capacity = capacity
        self._owners: OrderedDict[str, Owner] = OrderedDict()
        self._version = 0

    def __len__(self) -> int:
        return len(self._owners)

    def get(self, session: str) -> Owner | None:
        """The session's owner."""
        owner = self._owners.get(session)
        if owner is not None:
            self._owners.move_to_end(session)
        return owner

    def swap(self, session: str, expected: Owner | None, replica: str) -> Owner | None:
        """Make `replica` the owner if the owner is still `expected` (None: there is none).

        Returns:
            The new owner; None when somebody else was faster, and nothing changed.
        """
        if self._owners.get(session) != expected:
            return None
        self._version += 1
        owner = self._owners[session] = Owner(replica, self._version)
        self._owners.move_to_end(session)
        while len(self._owners) > self.capacity:
            self._owners.popitem(last=False)
        return owner

    def forget(self, replica: str) -> int:
        """The replica is gone: its sessions have no owner until their next request. Returns how many there were."""
        gone = [session for session, owner in self._owners.items() if owner.replica == replica]
        for session in gone:
            del self._owners[session]
        return len(gone)
