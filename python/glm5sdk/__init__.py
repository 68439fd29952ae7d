"""glm5sdk: the GLM-5 family on any hardware, built on one operator registry."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm5sdk import ops
    from glm5sdk.registry import backends, get_op, strict, use
    from glm5sdk.registry.explain import Explanation

__version__ = "0.1.0"
__all__ = ["backends", "explain", "get_op", "ops", "strict", "use"]

_REGISTRY = ("backends", "get_op", "strict", "use")


def __getattr__(name: str) -> Any:
    """Public names are imported on first use: torch takes a second, and `glm5 --help` needs none of it."""
    if name == "ops":
        return import_module("glm5sdk.ops")
    if name in _REGISTRY:
        if name == "get_op":
            import_module("glm5sdk.ops")  # declares what can be got
        return getattr(import_module("glm5sdk.registry"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Which implementation `op` would run for these arguments, and every reason why not the others.

    Raises:
        ContractError: no such op, or the arguments break its contract.
    """
    import_module("glm5sdk.ops")  # declares the ops
    return import_module("glm5sdk.registry").get_op(op).explain(*args, **kwargs)
