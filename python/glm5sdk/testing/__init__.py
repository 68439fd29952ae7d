"""The conformance suite, shipped: each (op, implementation) pair of any backend, in tree or not, is checked alike.

    pytest --pyargs glm5sdk.testing --backend cpu --tier test

or, where pytest does not find the plugin by itself, `python -m glm5sdk.testing --backend cpu`. In a program:

    from glm5sdk.testing import check_pair
    check_pair(get_op("rms_norm"), "mine.v1")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm5sdk.testing.failure import CheckFailed
    from glm5sdk.testing.inputs import Example, arguments
    from glm5sdk.testing.pair import check_pair
    from glm5sdk.testing.tiers import TIERS, Tier

__all__ = ["TIERS", "CheckFailed", "Example", "Tier", "arguments", "check_pair"]

# Loaded when asked for: the pytest plugin lives in this package, and must come up before pytest has seen hypothesis.
_HOMES = {
    "TIERS": "tiers",
    "CheckFailed": "failure",
    "Example": "inputs",
    "Tier": "tiers",
    "arguments": "inputs",
    "check_pair": "pair",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
