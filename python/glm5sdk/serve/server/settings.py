"""What an operator decides about the server."""

from __future__ import annotations

from dataclasses import dataclass

from glm5sdk.core.errors import ContractError

__all__ = ["ServerSettings"]


@dataclass(frozen=True)
class ServerSettings:
    """Checked when made.

    Attributes:
        model_names: names that requests may use; the first is the one that answers carry.
        root: where the model came from, shown by /v1/models.
        api_keys: any of them opens the ordinary routes; none leaves them open to everyone.
        admin_key: opens /admin; without one those routes refuse everybody.
        allow_origins: web origins that browsers may call from; none switches CORS off.
        max_body_bytes: of a request.
        max_json_depth: nested lists and objects of a request.
        request_timeout: seconds a request may take in all.
        body_timeout: seconds its body may take to arrive.
        max_queued_requests: sequences waiting beyond what the engine runs at once.
        max_queued_tokens: prompt tokens of requests that have not given a token yet.
        max_stored_responses: answers kept for `previous_response_id`.
        max_stored_bytes: of them all.
        drain_seconds: how long running requests may go on after SIGTERM.
    """

    model_names: tuple[str, ...] = ("glm5",)
    root: str = ""
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    allow_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    max_json_depth: int = 64
    request_timeout: float = 3600.0
    body_timeout: float = 60.0
    max_queued_requests: int = 1024
    max_queued_tokens: int = 4 << 20
    max_stored_responses: int = 1024
    max_stored_bytes: int = 64 << 20
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ContractError(f"server: model_names is {self.model_names!r}, needs at least one name")
        if bad := [key for key in (*self.api_keys, self.admin_key or "x") if not key.strip() or not key.isascii()]:
            raise ContractError(f"server: a key of {len(bad[0])} characters was given, needs ASCII text, not blank")
        for name in ("max_body_bytes", "max_json_depth", "request_timeout", "body_timeout"):
            if not getattr(self, name) > 0:
                raise ContractError(f"server: {name} is {getattr(self, name)}, needs more than 0")
        for name in (
            "max_queued_requests", "max_queued_tokens", "max_stored_responses", "max_stored_bytes", "drain_seconds",
        ):  # fmt: skip
            if not getattr(self, name) >= 0:
                raise ContractError(f"server: {name} is {getattr(self, name)}, needs 0 or more")
