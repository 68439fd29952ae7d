"""Handoff: the protocol that moves a cached prefix from one replica to another, as a machine without I/O.

    source                       router                          target
      |  <------- Export(id) ------ |                               |
      |  -- Exported(lease, n) ---> |                               |     pages pinned at the source, for a TTL
      |                             |  ------ Import(id) -------->  |
      |  <------ Renew(lease) ----- |                               |     while the import takes long
      |                             |  <----- Imported(n) --------  |     pages in the target's cache, not pinned
      |                             |  owner: compare and swap      |
      |  <----- Release(lease) ---- |                               |     pages free again
      |  -- Released -------------> |                               |

Why nothing is lost, doubled or pinned for ever:
- The owner changes in one place, by compare and swap, after the target has the pages and before the source gives up
  its own. Whoever dies, the table names one owner; a dead owner's sessions are forgotten and start anew.
- Only the source pins, under a lease that ends by itself. Every lease this machine ever hears of is released, also
  those of answers that come late or twice; a release that gets lost is sent again, and the TTL is behind it all.
- What the target imports is cache: if the handoff fails afterwards it is evicted like any other.
- Tokens never depend on it. The target finds the prefix by its own tokens, salt and weight version, or computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from glm5sdk.serve.router.owners import Owner, OwnerTable

__all__ = ["Action", "Do", "Handoff", "Outcome", "State"]


class State(Enum):
    """Where a handoff stands."""

    NEW = "new"
    EXPORTING = "exporting"
    IMPORTING = "importing"
    RELEASING = "releasing"
    DONE = "done"


class Outcome(Enum):
    """How it went; the request goes on in each case, if need be by computing the prefix again."""

    MOVED = "moved"
    NOTHING = "nothing"  # the source has no page of this prompt
    LOST_RACE = "lost_race"  # somebody else has given the session an owner meanwhile
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class Do(Enum):
    """What an action asks for."""

    EXPORT = "export"
    IMPORT = "import"
    RENEW = "renew"
    RELEASE = "release"


@dataclass(frozen=True)
class Action:
    """Send this. `at` is the replica, `lease` names the source's pin where there is one."""

    do: Do
    at: str
    lease: str = ""


class Handoff:
    """One prefix on its way. Every method takes what happened and returns what is to be sent."""

    def __init__(
        self, source: str, target: str, *, timeout: float, ttl: float, session: str | None = None,
        owners: OwnerTable | None = None, expected: Owner | None = None,
    ) -> None:  # fmt: skip
        """Plan it.

        Args:
            source: the replica that has it.
            target: the one that is to have it.
            timeout: seconds from start to import, after which the request goes on without.
            ttl: seconds of the source's lease.
            session: whose prefix it is; None when no ownership moves (prefill apart from decode).
            owners: the table to change.
            expected: the session's owner as it was when the target was chosen.
        """
        self.source, self.target = source, target
        self.state, self.lease, self.tokens, self.reason = State.NEW, "", 0, ""
        self.outcome: Outcome | None = None
        self._timeout, self._ttl = timeout, ttl
        self._session, self._owners, self._expected = session, owners, expected
        self._deadline = self._renew_at = self._again_at = self._expires = float("inf")

    @property
    def settled(self) -> bool:
        """Whether the request can go on: it is decided how this ends."""
        return self.outcome is not None

    def start(self, now: float) -> list[Action]:
        """Begin."""
        self.state, self._deadline = State.EXPORTING, now + self._timeout
        return [Action(Do.EXPORT, self.source)]

    def exported(self, lease: str, tokens: int, now: float) -> list[Action]:
        """The source has pinned `tokens` tokens' pages under this lease."""
        if self.state is not State.EXPORTING:
            # Late or doubled. Releasing is harmless twice; the one lease that is still in use stays.
            in_use = self.state is State.IMPORTING and lease == self.lease
            return [] if in_use or not lease else [Action(Do.RELEASE, self.source, lease)]
        self.lease, self.tokens = lease, tokens
        self._renew_at, self._expires = now + self._ttl / 2, now + self._ttl
        if tokens == 0:
            return self._settle(Outcome.NOTHING, now)
        self.state = State.IMPORTING
        return [Action(Do.IMPORT, self.target, lease)]

    def imported(self, tokens: int, now: float) -> list[Action]:
        """The target has them in its cache."""
        if self.state is not State.IMPORTING:
            return []
        self.tokens = tokens
        if self._owners is not None and self._session is not None:
            swapped = self._owners.swap(self._session, self._expected, self.target)
            return self._settle(Outcome.MOVED if swapped else Outcome.LOST_RACE, now)
        return self._settle(Outcome.MOVED, now)

    def failed(self, reason: str, now: float) -> list[Action]:
        """The export or the import did not work."""
        if self.state not in (State.EXPORTING, State.IMPORTING):
            return []
        self.reason = reason
        return self._settle(Outcome.FAILED, now)

    def cancel(self, now: float) -> list[Action]:
        """Nobody waits for it any more."""
        return self._settle(Outcome.CANCELLED, now) if self.state in (State.EXPORTING, State.IMPORTING) else []

    def renewed(self, now: float) -> list[Action]:
        """The lease lives longer."""
        if self.state is State.IMPORTING:
            self._expires = now + self._ttl
        return []

    def released(self, lease: str) -> list[Action]:
        """The source has let the pages go."""
        if self.state is State.RELEASING and lease == self.lease:
            self.state = State.DONE
        return []

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        if self.state in (State.EXPORTING, State.IMPORTING) and now >= self._deadline:
            self.reason = f"no answer while {self.state.value}"
            return self._settle(Outcome.TIMEOUT, now)
        if self.state is State.IMPORTING and now >= self._renew_at:
            self._renew_at = now + self._ttl / 2
            return [Action(Do.RENEW, self.source, self.lease)]
        if self.state is State.RELEASING:
            if now >= self._expires:  # it has ended by itself
                self.state = State.DONE
            elif now >= self._again_at:
                return self._release(now)
        return []

    def next_tick(self) -> float:
        """When `tick` has something to do."""
        if self.state in (State.EXPORTING, State.IMPORTING):
            return min(self._deadline, self._renew_at)
        return min(self._again_at, self._expires) if self.state is State.RELEASING else float("inf")

    def _settle(self, outcome: Outcome, now: float) -> list[Action]:
        self.outcome = outcome
        if not self.lease:
            self.state = State.DONE
            return []
        self.state = State.RELEASING
        return self._release(now)

    def _release(self, now: float) -> list[Action]:
        self._again_at = now + self._ttl / 4
        return [Action(Do.RELEASE, self.source, self.lease)]
