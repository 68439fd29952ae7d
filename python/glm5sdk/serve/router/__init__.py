"""The router: one door in front of many replicas; affinity to prefixes and sessions, never a hot spot."""

from __future__ import annotations

from glm5sdk.serve.router.app import Router, create_router
from glm5sdk.serve.router.choose import Affinity
from glm5sdk.serve.router.health import HealthRules
from glm5sdk.serve.router.settings import RouterSettings

__all__ = ["Affinity", "HealthRules", "Router", "RouterSettings", "create_router"]
