"""What all routes share: engine, settings, text, numbers, and the requests in flight."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from glm5sdk.serve.interface import EngineClient
from glm5sdk.serve.server.errors import ApiError
from glm5sdk.serve.server.limits import Admission
from glm5sdk.serve.server.metrics import Metrics
from glm5sdk.serve.server.model_text import ModelText
from glm5sdk.serve.server.responses_store import ResponseStore
from glm5sdk.serve.server.settings import ServerSettings
from glm5sdk.serve.transfer import Prefix

__all__ = ["Service", "new_id"]


def new_id(prefix: str) -> str:
    """A name for a request, a message or a call that nobody guesses."""
    return f"{prefix}{uuid.uuid4().hex}"


@dataclass
class Service:
    """One server.

    Attributes:
        engine, settings, text, metrics, admission: its parts.
        responses: answers kept for the Responses API.
        adapters: names of the loaded adapters, which requests use as model names.
        alive: answer id -> the engine's names of its requests, for /abort.
        exports: lease -> (what its pages are, when it ends on our clock); see kv_routes.
        in_flight: HTTP requests being answered.
        draining: no new work is taken.
        created: Unix time of the start.
    """

    engine: EngineClient
    settings: ServerSettings
    text: ModelText
    metrics: Metrics
    admission: Admission
    responses: ResponseStore
    adapters: set[str] = field(default_factory=set)
    alive: dict[str, tuple[str, ...]] = field(default_factory=dict)
    exports: dict[str, tuple[Prefix, float]] = field(default_factory=dict)
    in_flight: int = 0
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.settings.model_names[0]

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a request's `model` names; None is the plain model.

        Raises:
            ApiError: 404 there is no such model.
        """
        if model is None or model in self.settings.model_names:
            return None
        if model in self.adapters:
            return model
        known = ", ".join([*self.settings.model_names, *sorted(self.adapters)])
        raise ApiError(404, f"model: {model!r} is unknown, needs one of {known}", param="model", code="model_not_found")
