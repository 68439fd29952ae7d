"""What surrounds a client's process."""

from __future__ import annotations

import os


def outside(**more: str) -> dict[str, str]:
    """The environment of a client: nothing of this tree, nothing fetched from a hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "VIRTUAL"))}
    return {**kept, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "secret", **more}
