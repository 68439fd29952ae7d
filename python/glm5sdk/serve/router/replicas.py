"""Replicas and the fleet: who there is, how busy, and whether it gets requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from urllib.parse import urlsplit

from glm5sdk.core.errors import ContractError
from glm5sdk.serve.router.health import Health, HealthRules
from glm5sdk.serve.router.ring import Ring

__all__ = ["Fleet", "Replica", "replica_url"]


def replica_url(url: str) -> str:
    """The URL as the fleet names it: scheme, host and port (and a base path), without a slash at the end."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or port == -1
        or parts.query
        or parts.fragment
        or parts.username is not None
    ):
        raise ContractError(f"router: replica is {url!r}, needs a URL like http://host:8000")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


@dataclass
class Replica:
    """One server behind the router.

    Attributes:
        url: its name, too.
        health: whether it answers.
        in_flight: requests of this router that run on it.
        draining: it gets nothing new.
        busy_until: clock time until which it said that it is full.
        models: names it serves; empty while unknown.
    """

    url: str
    health: Health
    in_flight: int = 0
    draining: bool = False
    busy_until: float = 0.0
    models: tuple[dict[str, object], ...] = field(default=())

    @property
    def open(self) -> bool:
        """Whether new work may go there."""
        return self.health.up and not self.draining

    def serves(self, model: str) -> bool:
        """Whether it has said that it serves this model."""
        return any(entry.get("id") == model for entry in self.models)


class Fleet:
    """The replicas, and their ring. Names leave the ring only when a replica is removed, not when it is ill."""

    def __init__(self, urls: tuple[str, ...] = (), rules: HealthRules | None = None,
                 clock: Callable[[], float] = monotonic) -> None:  # fmt: skip
        self.rules = rules or HealthRules()
        self.clock = clock
        self.ring = Ring()
        self._replicas: dict[str, Replica] = {}
        for url in urls:
            self.add(url)

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Iterator[Replica]:
        return iter(tuple(self._replicas.values()))

    def get(self, url: str) -> Replica | None:
        """The replica of that name."""
        return self._replicas.get(url)

    def need(self, url: str) -> Replica:
        """The replica of that name; ContractError without one."""
        replica = self._replicas.get(replica_url(url))
        if replica is None:
            raise ContractError(f"router: replica is {url!r}, needs one of {sorted(self._replicas)}")
        return replica

    def add(self, url: str) -> Replica:
        """A new one, which gets requests after its first good check."""
        url = replica_url(url)
        if url in self._replicas:
            raise ContractError(f"router: replica {url} is there already, needs another URL")
        replica = self._replicas[url] = Replica(url, Health(self.rules))
        self.ring.add(url)
        return replica

    def remove(self, url: str) -> Replica:
        """Take one out; what runs on it goes on."""
        replica = self.need(url)
        del self._replicas[replica.url]
        self.ring.remove(replica.url)
        replica.draining = True
        return replica
