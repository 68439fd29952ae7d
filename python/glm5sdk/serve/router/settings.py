"""RouterSettings: everything that `glm5 route` can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from glm5sdk.core.errors import ContractError
from glm5sdk.serve.router.choose import Affinity
from glm5sdk.serve.router.health import HealthRules
from glm5sdk.serve.router.replicas import replica_url

__all__ = ["RouterSettings"]


@dataclass(frozen=True)
class RouterSettings:
    """Checked when made.

    Attributes:
        replicas: URLs at the start; more can be added later.
        prefill: URLs that compute prompts only; then `replicas` decode.
        api_keys: any of them opens the API; empty leaves it open. They are sent on, so replicas should know them too.
        admin_key: opens the admin routes; without one they refuse. It is also what replicas are asked with.
        affinity: weights of the choice.
        health: rules of the checks.
        max_body_bytes: of a request.
        body_timeout: seconds that a request's body may take to arrive.
        max_in_flight: requests on one replica; at the bound of all, new ones get 429.
        max_retries: other replicas that one request may try.
        connect_timeout, read_timeout: seconds; the second is between two pieces of an answer.
        handoff_timeout: seconds that moving a prefix may take before the request goes on without.
        prefill_timeout: the same where a prompt is computed first.
        lease_ttl: seconds that a replica holds pages for a handoff without hearing of it.
        migrate: move a session's prefix along when it changes replicas; needs `admin_key`.
    """

    replicas: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    affinity: Affinity = field(default_factory=Affinity)
    health: HealthRules = field(default_factory=HealthRules)
    max_body_bytes: int = 32 * 2**20
    body_timeout: float = 60.0
    max_in_flight: int = 1024
    max_retries: int = 3
    connect_timeout: float = 5.0
    read_timeout: float = 600.0
    handoff_timeout: float = 10.0
    prefill_timeout: float = 120.0
    lease_ttl: float = 30.0
    migrate: bool = False

    def __post_init__(self) -> None:
        for name in ("replicas", "prefill"):
            urls = tuple(replica_url(url) for url in getattr(self, name))
            object.__setattr__(self, name, urls)
            if twice := sorted({url for url in urls if urls.count(url) > 1}):
                raise ContractError(f"router: {name} names {twice[0]} twice, needs each URL once")
        if both := sorted(set(self.replicas) & set(self.prefill)):
            raise ContractError(f"router: {both[0]} is given as prefill and as decode, needs one of the two")
        for name in ("max_body_bytes", "max_in_flight"):
            if getattr(self, name) < 1:
                raise ContractError(f"router: {name} is {getattr(self, name)}, needs at least 1")
        if self.max_retries < 0:
            raise ContractError(f"router: max_retries is {self.max_retries}, needs at least 0")
        for name in (
            "body_timeout",
            "connect_timeout",
            "read_timeout",
            "handoff_timeout",
            "prefill_timeout",
            "lease_ttl",
        ):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ContractError(f"router: {name} is {getattr(self, name)}, needs seconds over 0")
        if any(not key for key in (*self.api_keys, "x" if self.admin_key is None else self.admin_key)):
            raise ContractError("router: a key is empty, needs a secret")
        if (self.prefill or self.migrate) and self.admin_key is None:
            raise ContractError(
                "router: admin_key is not given, needs the replicas' admin key to move prefixes between them"
            )
