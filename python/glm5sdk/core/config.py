"""The environment variables that glm5sdk reads, all of them, in one place."""

from __future__ import annotations

import os

__all__ = ["backends_from_environment", "log_level_from_environment", "strict_from_environment"]

BACKENDS_VARIABLE = "GLM5SDK_BACKENDS"
STRICT_VARIABLE = "GLM5SDK_STRICT"
LOG_VARIABLE = "GLM5SDK_LOG"


def backends_from_environment() -> tuple[str, ...]:
    """Names in `GLM5SDK_BACKENDS`, comma separated, in order of preference; empty when unset."""
    return tuple(name.strip() for name in os.environ.get(BACKENDS_VARIABLE, "").split(",") if name.strip())


def strict_from_environment() -> bool:
    """Whether `GLM5SDK_STRICT` asks that an op without a kernel in the chosen backend be an error."""
    return os.environ.get(STRICT_VARIABLE, "0") not in ("", "0", "false", "no")


def log_level_from_environment() -> str:
    """The level name in `GLM5SDK_LOG` (debug, info, warning, error), `warning` when unset."""
    return os.environ.get(LOG_VARIABLE, "warning").upper()
