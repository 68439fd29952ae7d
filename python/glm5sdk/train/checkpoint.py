"""Resumable checkpoints: a Hugging Face checkpoint and the trainer's state in one folder, there whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from glm5sdk.core.errors import CheckpointError
from glm5sdk.models.glm5.model import Glm5ForCausalLM

__all__ = ["STATE", "latest_checkpoint", "load_state", "save_state"]

STATE = "trainer.pt"
_FOLDER = re.compile(r"step-(\d{8})")


def save_state(
    folder: str | PathLike[str], model: Glm5ForCausalLM, state: dict[str, Any], step: int, keep: int
) -> Path:
    """Write `folder`/step-<number>: first under a hidden name, then renamed, then older ones removed.

    Args:
        folder: of the run.
        model: written by `save_pretrained`, with the tokenizer files it carries.
        state: tensors, numbers, strings, lists and dicts of them.
        step: number of the checkpoint.
        keep: newest checkpoints that stay.

    Returns:
        The checkpoint's folder.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    target, part = root / f"step-{step:08d}", root / f".step-{step:08d}.part"
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    with open(part / STATE, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    if target.exists():
        shutil.rmtree(target)
    os.replace(part, target)
    for _, old in _checkpoints(root)[:-keep]:
        shutil.rmtree(old)
    return target


def latest_checkpoint(folder: str | PathLike[str]) -> Path | None:
    """The newest checkpoint of a run, None if there is none."""
    found = _checkpoints(Path(folder))
    return found[-1][1] if found else None


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The trainer's state of a checkpoint.

    Raises:
        CheckpointError: missing, damaged, or holding anything but plain data.
    """
    file = checkpoint / STATE
    if not file.is_file():
        raise CheckpointError(f"{file}: file is missing, needs the state of a training run")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged archives raise many kinds
        raise CheckpointError(f"{file}: content is damaged ({error}), needs a state saved by training") from error


def _checkpoints(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    matches = ((_FOLDER.fullmatch(f.name), f) for f in root.iterdir() if f.is_dir())
    return sorted((int(m[1]), f) for m, f in matches if m)
