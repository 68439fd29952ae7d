"""What a checkpoint says about generating: every id that stops it, and its sampling defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from glm5sdk.core.errors import CheckpointError
from glm5sdk.text.json_file import read_json_object

__all__ = ["GenerationConfig"]


@dataclass(frozen=True)
class GenerationConfig:
    """Stop ids and sampling defaults.

    Attributes:
        stop_ids: ids after any of which generation ends (GLM-5 has three), in the file's order, without duplicates.
        pad_id: the id that fills padded rows, or None.
        temperature: 0 means greedy.
        top_p: nucleus mass in (0, 1]; 1 keeps all.
        top_k: 0 keeps all.
        min_p: smallest kept probability relative to the best; 0 keeps all.
    """

    stop_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def from_pretrained(cls, path: str | PathLike[str]) -> GenerationConfig:
        """Read `generation_config.json` of a checkpoint folder; a key it lacks is looked up in `config.json`.

        Raises:
            CheckpointError: a file is damaged or a value is out of range; the message names file and key.
        """
        folder = Path(path)
        files = [(folder / name, read_json_object(folder / name)) for name in ("generation_config.json", "config.json")]
        pad = _ids(files, "pad_token_id")
        return cls(
            stop_ids=_ids(files, "eos_token_id"),
            pad_id=pad[0] if pad else None,
            temperature=_number(files[:1], "temperature", cls.temperature, 0.0, float("inf")),
            top_p=_number(files[:1], "top_p", cls.top_p, 0.0, 1.0),
            top_k=int(_number(files[:1], "top_k", cls.top_k, 0, float("inf"))),
            min_p=_number(files[:1], "min_p", cls.min_p, 0.0, 1.0),
        )


_Files = list[tuple[Path, dict[str, Any]]]


def _first(files: _Files, key: str) -> tuple[Path, Any]:
    """The first file that has a value for `key`, and the value; (folder, None) when none has."""
    for path, content in files:
        nested = content.get("text_config")  # where composite models keep the language model's settings
        for part in (content, nested if isinstance(nested, Mapping) else {}):
            if part.get(key) is not None:
                return path, part[key]
    return files[0][0], None


def _ids(files: _Files, key: str) -> tuple[int, ...]:
    path, value = _first(files, key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or token < 0:
            raise CheckpointError(f"{path}: {key} is {value!r}, needs a token id >= 0 or a list of them")
    return tuple(dict.fromkeys(ids))


def _number(files: _Files, key: str, default: float, low: float, high: float) -> float:
    path, value = _first(files, key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise CheckpointError(f"{path}: {key} is {value!r}, needs a number in [{low}, {high}]")
    return value
