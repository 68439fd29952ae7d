"""glm5sdk: the GLM-5 family on any hardware, built on one operator registry."""

from __future__ import annotations

from typing import Any

from glm5sdk import ops
from glm5sdk.registry import backends, get_op, strict, use
from glm5sdk.registry.explain import Explanation

__version__ = "0.1.0"
__all__ = ["backends", "explain", "get_op", "ops", "strict", "use"]


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Which implementation `op` would run for these arguments, and every reason why not the others.

    Raises:
        ContractError: no such op, or the arguments break its contract.
    """
    return get_op(op).explain(*args, **kwargs)
