"""How an op is declared, found, chosen, run and explained."""

from __future__ import annotations

from glm5sdk.registry.cost import Cost
from glm5sdk.registry.device import Device
from glm5sdk.registry.impl import CallInfo, Impl, Requires, at_most, multiple_of, one_of
from glm5sdk.registry.plugins import API_VERSION, backends, register_backend, unregister_backend
from glm5sdk.registry.resolved import Resolved
from glm5sdk.registry.select import current_use, strict, use
from glm5sdk.registry.spec import CATALOGUE, Op, get_op, op
from glm5sdk.registry.testing_rules import TestRules
from glm5sdk.registry.weight import Layout, Weight, WeightLike, load_weight

__all__ = [
    "API_VERSION",
    "CATALOGUE",
    "CallInfo",
    "Cost",
    "Device",
    "Impl",
    "Layout",
    "Op",
    "Requires",
    "Resolved",
    "TestRules",
    "Weight",
    "WeightLike",
    "at_most",
    "backends",
    "current_use",
    "get_op",
    "load_weight",
    "multiple_of",
    "one_of",
    "op",
    "register_backend",
    "strict",
    "unregister_backend",
    "use",
]
