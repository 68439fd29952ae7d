"""Chooser: which replica a request should go to, best first.

Three forces, in this order. A bound: no replica is given more than `bound` times its fair share of what runs
(consistent hashing with bounded loads), so affinity never makes a hot spot. Affinity: among those under the bound, the
matched fraction of the prompt less `beta` times the load relative to the mean. The ring: when nobody knows the prompt,
or scores are equal, the session's own order around the circle.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from glm5sdk.core.errors import ContractError
from glm5sdk.serve.router.owners import Owner, OwnerTable
from glm5sdk.serve.router.prefixes import PrefixIndex, chunk_chain
from glm5sdk.serve.router.replicas import Fleet, Replica
from glm5sdk.serve.router.request import RoutedRequest

__all__ = ["Affinity", "Choice", "Chooser", "share_of"]


@dataclass(frozen=True)
class Affinity:
    """The weights of the choice.

    Attributes:
        beta: what a load of one mean load costs, in matched fractions.
        bound: largest load in fair shares; at least 1.
        floor: requests at a time that are no load worth balancing; a replica may run as many whatever its share is.
        chunk: bytes of prompt that the index tells apart.
        longest: chunks of a prompt that count.
        capacity: chunks that the index remembers, about 130 bytes each.
        sessions: sessions whose owner is remembered.
        least: matched fraction under which the ring decides alone.
    """

    beta: float = 0.25
    bound: float = 1.25
    floor: int = 4
    chunk: int = 256
    longest: int = 1024
    capacity: int = 200_000
    sessions: int = 100_000
    least: float = 0.05

    def __post_init__(self) -> None:
        if not 0.0 <= self.beta < math.inf:
            raise ContractError(f"affinity: beta is {self.beta}, needs at least 0")
        if not 1.0 <= self.bound < math.inf:
            raise ContractError(f"affinity: bound is {self.bound}, needs at least 1")
        if not 0.0 <= self.least <= 1.0:
            raise ContractError(f"affinity: least is {self.least}, needs a fraction")
        for name in ("floor", "chunk", "longest", "capacity", "sessions"):
            if getattr(self, name) < 1:
                raise ContractError(f"affinity: {name} is {getattr(self, name)}, needs at least 1")


@dataclass(frozen=True)
class Choice:
    """Replicas to try, best first, and why.

    Attributes:
        replicas: all that may serve the request.
        matched: fraction of the prompt that each one is thought to hold.
        chain: the prompt's chunks, which `sent` remembers.
        owner: of the session, as it was when this was chosen.
    """

    replicas: tuple[Replica, ...]
    matched: Mapping[str, float]
    chain: Sequence[bytes]
    owner: Owner | None


def share_of(affinity: Affinity, running: int, replicas: int) -> int:
    """Requests that one replica may run once a new one joins `running` others: ceil(bound * mean), or the floor."""
    return max(affinity.floor, math.ceil(affinity.bound * (running + 1) / replicas))


class Chooser:
    """Knows the fleet, the prefixes and the owners of sessions; decides, and remembers what was decided."""

    def __init__(self, fleet: Fleet, affinity: Affinity | None = None) -> None:
        self.fleet = fleet
        self.affinity = affinity or Affinity()
        self.prefixes = PrefixIndex(self.affinity.capacity)
        self.owners = OwnerTable(self.affinity.sessions)
        self.responses = OwnerTable(self.affinity.sessions)

    def choose(self, request: RoutedRequest, among: Collection[str] | None = None) -> Choice:
        """Order the replicas that are open for this request.

        Args:
            request: what came.
            among: URLs to stay within.

        Returns:
            The choice; without replicas when none is open.
        """
        chain = chunk_chain(request.prompt, self.affinity.chunk, self.affinity.longest, request.salt)
        if request.response_id is not None and (keeper := self._keeper(request.response_id)) is not None:
            return Choice((keeper,), self.prefixes.matched(chain), chain, None)
        open_ = {r.url: r for r in self.fleet if r.open and (among is None or r.url in among)}
        if request.model is not None and (fit := {u: r for u, r in open_.items() if r.serves(request.model)}):
            open_ = fit
        owner = self.owners.get(request.session) if request.session is not None else None
        if not open_:
            return Choice((), {}, chain, owner)
        matched = {url: part for url, part in self.prefixes.matched(chain).items() if url in open_}
        order = [url for url in self.fleet.ring.order(request.key) if url in open_]
        if owner is not None and owner.replica in open_:
            order.sort(key=lambda url: url != owner.replica)  # stable: the owner first, then the ring
        ranked = self._by_score(order, matched, open_)
        now = self.fleet.clock()
        free = [r for r in open_.values() if r.busy_until <= now] or list(open_.values())
        share = share_of(self.affinity, sum(r.in_flight for r in free), len(free))
        # Never dropped, only moved back: those over their share, and behind them those that said they were full.
        ranked.sort(key=lambda url: (open_[url].busy_until > now, open_[url].in_flight + 1 > share))
        return Choice(tuple(open_[url] for url in ranked), matched, chain, owner)

    def sent(self, choice: Choice, replica: Replica) -> None:
        """The request is on its way: what comes in the same moment finds its prefix there already."""
        self.prefixes.insert(choice.chain, replica.url)

    def accepted(self, request: RoutedRequest, choice: Choice, replica: Replica) -> None:
        """The replica has begun: it owns the session, unless that was decided anew in the meantime."""
        if request.session is not None and (choice.owner is None or choice.owner.replica != replica.url):
            self.owners.swap(request.session, choice.owner, replica.url)

    def made(self, response_id: str, replica: Replica) -> None:
        """The replica keeps a response under this name; what refers to it must go there, draining or not."""
        if self.responses.get(response_id) is None:
            self.responses.swap(response_id, None, replica.url)

    def lost(self, url: str) -> None:
        """What the replica had in memory is gone."""
        self.prefixes.forget(url)
        self.owners.forget(url)
        self.responses.forget(url)

    def _keeper(self, response_id: str) -> Replica | None:
        owner = self.responses.get(response_id)
        replica = self.fleet.get(owner.replica) if owner is not None else None
        return replica if replica is not None and replica.health.up else None

    def _by_score(self, order: list[str], matched: Mapping[str, float], open_: Mapping[str, Replica]) -> list[str]:
        if max(matched.values(), default=0.0) < self.affinity.least:
            return order
        mean = max(1.0, sum(r.in_flight for r in open_.values()) / len(open_))

        def score(url: str) -> float:
            return matched.get(url, 0.0) - self.affinity.beta * open_[url].in_flight / mean

        return sorted(order, key=lambda url: -score(url))
