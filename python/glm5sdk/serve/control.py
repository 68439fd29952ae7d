"""Administrative commands of an engine, by name: what server, router and trainer may ask for between steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from glm5sdk.core.errors import ContractError

if TYPE_CHECKING:
    from glm5sdk.serve.engine import Engine

__all__ = ["commands", "run_command"]


def commands(engine: Engine) -> dict[str, Callable[..., Any]]:
    """Every command with the method that does it; docs/serving.md describes them."""
    return {
        "pause": engine.pause,
        "resume": engine.resume,
        "flush_cache": engine.flush_cache,
        "export_prefix": engine.transfer.export_prefix,
        "read_lease": engine.transfer.read_lease,
        "renew_lease": engine.transfer.renew_lease,
        "release_lease": engine.transfer.release_lease,
        "import_prefix": engine.transfer.import_prefix,
    }


def run_command(engine: Engine, command: str, arguments: Mapping[str, Any]) -> Any:
    """Run a command when no step is in flight.

    Raises:
        ContractError: there is no such command, or its arguments do not fit; nothing was done.
    """
    known = commands(engine)
    if command not in known:
        raise ContractError(f"engine: command is {command!r}, needs one of: {', '.join(known)}")
    try:
        inspect.signature(known[command]).bind(**arguments)
    except TypeError as error:
        raise ContractError(f"engine: arguments of {command} do not fit: {error}") from None
    engine.drain()
    return known[command](**arguments)
