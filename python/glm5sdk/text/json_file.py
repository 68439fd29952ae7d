"""Read a checkpoint's JSON files, with one clear error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from glm5sdk.core.errors import CheckpointError

__all__ = ["read_json_object"]


def read_json_object(path: Path, *, needed: bool = False) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: the file.
        needed: whether its absence is an error; otherwise an absent file reads as `{}`.

    Raises:
        CheckpointError: the file is needed and missing, or is not a JSON object.
    """
    if not needed and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: file is unreadable ({error.strerror}), needs a JSON object") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: content is damaged ({error}), needs a JSON object") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: content is a JSON {type(value).__name__}, needs an object")
    return value
