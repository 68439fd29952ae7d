"""Every stop id is honoured, wherever the checkpoint stores it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5sdk.core.errors import CheckpointError
from glm5sdk.text import GenerationConfig


def _write(folder: Path, generation: object = None, config: object = None) -> Path:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("generation", "config", "stops"),
    [
        ({"eos_token_id": [154820, 154827, 154829]}, {"eos_token_id": 5}, (154820, 154827, 154829)),
        ({"eos_token_id": 7}, None, (7,)),
        ({"temperature": 0.5}, {"eos_token_id": [3, 4, 3]}, (3, 4)),
        ({"eos_token_id": None}, {"eos_token_id": 0}, (0,)),
        (None, {"eos_token_id": 9}, (9,)),
        (None, {"text_config": {"eos_token_id": [1, 2]}}, (1, 2)),
        ({"eos_token_id": []}, {"eos_token_id": 9}, ()),
        (None, None, ()),
    ],
)
def test_stop_ids(tmp_path: Path, generation: object, config: object, stops: tuple[int, ...]) -> None:
    assert GenerationConfig.from_pretrained(_write(tmp_path, generation, config)).stop_ids == stops


def test_sampling_defaults(tmp_path: Path) -> None:
    _write(tmp_path, {"temperature": 1.0, "top_p": 0.95, "pad_token_id": 154820}, {"top_p": 0.1})
    assert GenerationConfig.from_pretrained(tmp_path) == GenerationConfig((), 154820, 1.0, 0.95, 0, 0.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"eos_token_id": "2"}, r"generation_config\.json: eos_token_id is '2', needs a token id"),
        ({"eos_token_id": [1, -2]}, r"eos_token_id is \[1, -2\], needs a token id"),
        ({"eos_token_id": True}, "eos_token_id is True"),
        ({"top_p": 1.5}, r"top_p is 1\.5, needs a number in \[0\.0, 1\.0\]"),
        ({"temperature": -1}, "temperature is -1"),
        ([1], "content is a JSON list, needs an object"),
    ],
)
def test_bad_values_name_file_and_key(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        GenerationConfig.from_pretrained(_write(tmp_path, content))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{\xff")
    with pytest.raises(CheckpointError, match=r"config\.json: content is damaged"):
        GenerationConfig.from_pretrained(tmp_path)
