"""Damaged, incomplete and foreign checkpoints are refused on opening, naming tensor and file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import saved, small, write_file, write_raw
from safetensors.torch import load_file, save_file
from torch import Tensor

from glm5sdk.core.errors import CheckpointError
from glm5sdk.models.glm5 import open_checkpoint
from glm5sdk.models.glm5.checkpoint_files import read_header

Edit = Callable[[dict[str, Tensor]], Any]
Q_A = "model.layers.0.self_attn.q_a_proj.weight"  # [40, 64]


def edited(path: Path, edit: Edit) -> None:
    """A good checkpoint in one file, with its tensors edited."""
    saved(path, small())
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


def fp8(tensors: dict[str, Tensor], name: str = Q_A, scales: Tensor | None = None) -> None:
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    if scales is not None:
        tensors[name + "_scale_inv"] = scales


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda t: t.pop(Q_A), f"lacks 1 \\({Q_A}\\)"),
        (lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"), r"lacks 1 \(.*experts.3.up_proj.weight\)"),
        (lambda t: t.pop("model.layers.3.self_attn.indexer.k_norm.bias"), "k_norm.bias"),
        # layer 2 is shared: an indexer there means another schedule
        (
            lambda t: t.update({"model.layers.2.self_attn.indexer.wk.weight": torch.zeros(16, 64)}),
            r"model.safetensors has an unexpected 1 \(model.layers.2.self_attn.indexer.wk.weight\)",
        ),
        (lambda t: t.update({"model.layers.5.enorm.weight": torch.zeros(64)}), "unexpected 1"),
        (lambda t: t.update({"model.norm.bias": t.pop("model.norm.weight")}), "lacks 1 .* and has an unexpected 1"),
        (lambda t: t.update({Q_A: torch.zeros(64, 40)}), rf"{Q_A} in .*safetensors is \[64, 40\], needs \[40, 64\]"),
        (
            lambda t: t.update({Q_A: torch.zeros(40, 64, dtype=torch.int8)}),
            f"{Q_A} .* is I8 without scales, needs {Q_A}_scale",
        ),
        (lambda t: t.update({Q_A: torch.zeros(40, 64).to(torch.float8_e5m2)}), "is F8_E5M2, needs"),
        (fp8, f"{Q_A} .* is F8_E4M3 without scales, needs {Q_A}_scale_inv"),
        (lambda t: fp8(t, scales=torch.ones(2, 1)), r"scale_inv in .* is F32 \[2, 1\], needs F32 \[1, 1\]"),
        (lambda t: fp8(t, scales=torch.ones(1, 1).half()), r"scale_inv in .* is F16 \[1, 1\], needs F32"),
        (lambda t: t.update({Q_A + "_scale_inv": torch.ones(1, 1)}), "is F32 and has scales"),
        (lambda t: fp8(t, "model.norm.weight"), "only matrices are quantised"),
        (lambda t: t.update({Q_A + "_scale": torch.ones(1)}), "weight_scale in .* is a scale of an unknown kind"),
        (
            lambda t: t.update({Q_A.replace("weight", "input_scale"): torch.ones(1)}),
            "input_scale in .* is a scale of an unknown kind",
        ),
        (lambda t: t.update({Q_A + "_scale_2": torch.ones(1)}), "is a scale of an unknown kind"),
        (
            lambda t: t.update({"model.layers.4.shared_head.head.weight_scale_inv": torch.ones(1, 1)}),
            "unexpected 1 .*shared_head.head.weight_scale_inv",
        ),
        (lambda t: t.update({"model.layers.9.x.weight_scale_inv": torch.ones(1, 1)}), "unexpected 1"),
    ],
)
def test_tensors_that_do_not_fit_the_config(tmp_path: Path, edit: Edit, message: str) -> None:
    edited(tmp_path, edit)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_long_list_is_shortened(tmp_path: Path) -> None:
    edited(tmp_path, lambda t: [t.pop(name) for name in list(t) if ".experts." in name])
    with pytest.raises(CheckpointError, match=r"lacks 48 \(.* and 42 more\)"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("cut", [1, 1000, -1])
def test_truncated_file(tmp_path: Path, cut: int) -> None:
    saved(tmp_path, small())
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-cut] if cut > 0 else data[:4])
    with pytest.raises(CheckpointError, match=r"model.safetensors is .*truncated"):
        open_checkpoint(tmp_path)


def test_file_with_bytes_left_over(tmp_path: Path) -> None:
    saved(tmp_path, small())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="is corrupt: it has"):
        open_checkpoint(tmp_path)


def test_git_lfs_pointer(tmp_path: Path) -> None:
    saved(tmp_path, small())
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match="git-lfs pointer"):
        open_checkpoint(tmp_path)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header, message",
    [
        (b"{", "corrupt header"),
        (b"\xff\xfe", "corrupt header"),
        (b"[]", "corrupt header"),
        (b'{"a": 1, "a": 2}', "occurs twice"),
        (b'{"a": 3}', "corrupt header entry"),
        (json.dumps({"a": {**ENTRY, "shape": [-2]}}).encode(), "corrupt header entry"),
        (json.dumps({"a": {**ENTRY, "shape": [2.0]}}).encode(), "corrupt header entry"),
        (json.dumps({"a": {"dtype": "F32", "shape": [2]}}).encode(), "corrupt header entry"),
        (json.dumps({"a": {**ENTRY, "data_offsets": [0, 4, 8]}}).encode(), "corrupt header entry"),
        (json.dumps({"a": {**ENTRY, "dtype": "F4"}}).encode(), "a in .* has dtype 'F4'"),
        (json.dumps({"a": {**ENTRY, "shape": [3]}}).encode(), r"is 8 bytes, needs 12 for F32 \[3\]"),
        (json.dumps({"a": ENTRY, "b": ENTRY}).encode(), "b in .* begins at byte 0, needs 8"),
        (json.dumps({"a": {**ENTRY, "data_offsets": [4, 12]}}).encode(), "begins at byte 4, needs 0"),
        (json.dumps({"a": {**ENTRY, "shape": [1], "data_offsets": [0, 4]}}).encode(), "has 8 bytes of data, needs 4"),
    ],
)
def test_corrupt_header(tmp_path: Path, header: bytes, message: str) -> None:
    write_raw(tmp_path / "x.safetensors", header, b"\0" * 8)
    with pytest.raises(CheckpointError, match=message):
        read_header(tmp_path / "x.safetensors")


def test_header_longer_than_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="is 10 bytes with a header of 1099511627776"):
        read_header(tmp_path / "x.safetensors")


def test_empty_tensor_lies_anywhere_between(tmp_path: Path) -> None:
    write_file(
        tmp_path / "x.safetensors", [("a", "F32", [1], b"\0" * 4), ("e", "F32", [0], b""), ("b", "U8", [1], b"1")]
    )
    assert list(read_header(tmp_path / "x.safetensors")) == ["a", "e", "b"]


def test_no_files(tmp_path: Path) -> None:
    config = small()
    with pytest.raises(CheckpointError, match="does not exist, needs a local directory"):
        open_checkpoint(tmp_path / "absent", config)
    with pytest.raises(CheckpointError, match="has no weights"):
        open_checkpoint(tmp_path, config)
    with pytest.raises(CheckpointError, match="config.json is missing"):
        open_checkpoint(tmp_path)


# Indexes


def shards(path: Path) -> tuple[Path, dict[str, Any]]:
    saved(path, small(), max_shard_bytes=100_000)
    index = path / "model.safetensors.index.json"
    return index, json.loads(index.read_text())


def test_both_kinds_of_checkpoint_in_one_place(tmp_path: Path) -> None:
    shards(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="has both"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_corrupt_index(tmp_path: Path, text: str) -> None:
    index, _ = shards(tmp_path)
    index.write_text(text)
    with pytest.raises(CheckpointError, match=r"index.json is corrupt"):
        open_checkpoint(tmp_path)


def test_index_naming_an_absent_shard(tmp_path: Path) -> None:
    shards(tmp_path)
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {gone.name}"):
        open_checkpoint(tmp_path)


def test_index_naming_an_absent_tensor(tmp_path: Path) -> None:
    index, values = shards(tmp_path)
    values["weight_map"]["ghost"] = values["weight_map"][Q_A]
    index.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=f"{values['weight_map'][Q_A]} does not hold ghost"):
        open_checkpoint(tmp_path)


def test_index_naming_another_shard(tmp_path: Path) -> None:
    index, values = shards(tmp_path)
    files = sorted(set(values["weight_map"].values()))
    right = values["weight_map"][Q_A]
    values["weight_map"][Q_A] = next(file for file in files if file != right)
    index.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=f"{right} holds {Q_A}, which .* does not map to it"):
        open_checkpoint(tmp_path)


def test_index_without_a_stored_tensor(tmp_path: Path) -> None:
    index, values = shards(tmp_path)
    del values["weight_map"][Q_A]
    index.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=f"holds {Q_A}, which"):
        open_checkpoint(tmp_path)


def test_index_cannot_leave_its_directory(tmp_path: Path) -> None:
    index, values = shards(tmp_path / "a")
    values["weight_map"][Q_A] = "../b.safetensors"
    index.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="needs a file name beside the index"):
        open_checkpoint(tmp_path / "a")
