"""Commands that take --backend enter it here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import glm5sdk

__all__ = ["chosen"]


def chosen(backends: Sequence[str]) -> AbstractContextManager[Any]:
    """`glm5sdk.use(*backends)`, or nothing when none was named."""
    return glm5sdk.use(*backends) if backends else nullcontext()
