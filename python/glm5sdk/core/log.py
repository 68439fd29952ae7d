"""One logger tree, silent by default, and a way to say a thing once."""

from __future__ import annotations

import logging

from glm5sdk.core.config import log_level_from_environment

__all__ = ["get_logger", "log_once"]

_ROOT = "glm5sdk"
_said: set[tuple[str, str]] = set()


def get_logger(name: str) -> logging.Logger:
    """The logger `glm5sdk.<name>`; the level comes from `GLM5SDK_LOG`, handlers from the application."""
    root = logging.getLogger(_ROOT)
    if root.level == logging.NOTSET:
        root.setLevel(log_level_from_environment())
    return root.getChild(name)


def log_once(logger: logging.Logger, level: int, message: str) -> None:
    """Log `message` the first time this process meets it."""
    if (logger.name, message) not in _said:
        _said.add((logger.name, message))
        logger.log(level, message)
