"""A short name for a checkpoint's contents, so that two servers know whether they hold the same weights."""

from __future__ import annotations

import hashlib
from os import PathLike
from pathlib import Path

from glm5sdk.core.errors import CheckpointError

__all__ = ["fingerprint"]

BLOCK = 4096
BLOCKS = 256  # of each file, evenly spread: a training step touches them all, and 400 GB are not read for a name


def fingerprint(path: str | PathLike[str]) -> str:
    """Twelve hexadecimal digits from config.json and the weight files: their sizes, headers and samples of their bytes.

    Copies of a checkpoint have equal fingerprints wherever they lie. It tells versions apart, not forgeries.

    Args:
        path: checkpoint folder.

    Raises:
        CheckpointError: a file cannot be read.
    """
    folder, whole = Path(path), hashlib.blake2b(digest_size=6)
    for file in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        try:
            size = file.stat().st_size
            whole.update(f"{file.name} {size} ".encode())
            with file.open("rb") as stream:
                whole.update(stream.read(1 << 20))
                for block in range(BLOCKS):
                    stream.seek(block * max(0, size - BLOCK) // BLOCKS)
                    whole.update(stream.read(BLOCK))
        except OSError as error:
            raise CheckpointError(f"{file}: file cannot be read ({error}), needs to be a checkpoint's") from error
    return whole.hexdigest()
