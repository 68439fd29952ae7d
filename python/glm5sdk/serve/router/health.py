"""Health of one replica as a small machine: what was seen goes in, whether it gets requests comes out."""

from __future__ import annotations

from dataclasses import dataclass

from glm5sdk.core.errors import ContractError

__all__ = ["Health", "HealthRules"]


@dataclass(frozen=True)
class HealthRules:
    """When a replica is believed.

    Attributes:
        interval: seconds between active checks of a healthy replica.
        timeout: seconds a check may take.
        fall: failed checks in a row that eject it.
        rise: good checks in a row that readmit it.
        first_recheck: seconds until an ejected one is first asked again; doubles up to `interval`.
    """

    interval: float = 10.0
    timeout: float = 5.0
    fall: int = 2
    rise: int = 1
    first_recheck: float = 0.5

    def __post_init__(self) -> None:
        for name in ("interval", "timeout", "first_recheck"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ContractError(f"health rules: {name} is {getattr(self, name)}, needs seconds over 0")
        for name in ("fall", "rise"):
            if getattr(self, name) < 1:
                raise ContractError(f"health rules: {name} is {getattr(self, name)}, needs at least 1")


class Health:
    """Starts unknown, which gets no requests; its first check decides at once."""

    def __init__(self, rules: HealthRules) -> None:
        self.rules = rules
        self.up = False
        self.reason = "not checked yet"
        self.ejections = 0
        self._good = self._bad = 0
        self._known = False
        self._recheck = rules.first_recheck

    def passed(self) -> bool:
        """A check went well. Returns whether this readmits the replica."""
        self._bad = 0
        self._good += 1
        if self.up or (self._known and self._good < self.rules.rise):
            return False
        self.up, self._known, self.reason = True, True, ""
        self._recheck = self.rules.first_recheck
        return True

    def failed(self, reason: str) -> bool:
        """A check went wrong. Returns whether this ejects the replica."""
        self._good = 0
        self._bad += 1
        if not self.up:
            self._known, self.reason = True, reason
            return False
        return self._bad >= self.rules.fall and self.eject(reason)

    def eject(self, reason: str) -> bool:
        """It cannot be reached at all: no need to count. Returns whether it was up."""
        was = self.up
        self.up, self._known, self.reason, self._good = False, True, reason, 0
        self.ejections += was
        return was

    def next_check(self) -> float:
        """Seconds until the next check; grows while the replica stays down."""
        if self.up:
            return self.rules.interval
        wait = min(self._recheck, self.rules.interval)
        self._recheck = min(self._recheck * 2, self.rules.interval)
        return wait
