"""A checkpoint's name follows its contents, not its place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from glm5sdk.core.errors import CheckpointError
from glm5sdk.models.glm5 import Glm5ForCausalLM, preset
from glm5sdk.models.glm5.fingerprint import fingerprint


def test_copies_agree_and_other_weights_differ(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Glm5ForCausalLM(preset("tiny", num_hidden_layers=1, vocab_size=64))
    model.save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
    model.save_pretrained(tmp_path / "c")
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "c")
    config = tmp_path / "b" / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'))
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config.json"):
        fingerprint(tmp_path)
