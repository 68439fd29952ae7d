"""Saving checkpoints: layout, shards, what is refused, and that a failure leaves the old checkpoint alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_cases import random_tensors, saved, small
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from glm5sdk.core.errors import CheckpointError
from glm5sdk.models.glm5 import Glm5Config, checkpoint_save, open_checkpoint, save_checkpoint


def files(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def holds(path: Path, tensors: dict[str, Tensor]) -> bool:
    found = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_one_file(tmp_path: Path) -> None:
    config = small(extra={"transformers_version": "5.23.0"})
    tensors = saved(tmp_path / "new/place", config)
    assert files(tmp_path / "new/place") == ["config.json", "model.safetensors"]
    assert holds(tmp_path / "new/place", tensors)
    with safe_open(tmp_path / "new/place/model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert Glm5Config.from_pretrained(tmp_path / "new/place") == config


def test_shards_are_bounded_and_indexed(tmp_path: Path) -> None:
    config = small()
    tensors = saved(tmp_path, config, max_shard_bytes=60_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    count = len(names)
    assert count > 5
    assert names == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert files(tmp_path) == sorted([*names, "config.json", "model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    for name in names:
        held = load_file(tmp_path / name)
        assert sum(t.numel() * t.element_size() for t in held.values()) <= 60_000
        assert {index["weight_map"][tensor] for tensor in held} == {name}
    assert holds(tmp_path, tensors)


def test_config_gets_the_dtype_of_the_tensors(tmp_path: Path) -> None:
    config = small(dtype="float32")
    save_checkpoint(tmp_path, config, random_tensors(config, dtype=torch.bfloat16).items())
    assert Glm5Config.from_pretrained(tmp_path).dtype == "bfloat16"


def test_extra_files(tmp_path: Path) -> None:
    source = tmp_path / "source.json"
    source.write_text("{}")
    extra = {"generation_config.json": b'{"top_p": 0.95}', "tokenizer.json": source}
    saved(tmp_path / "x", small(), extra_files=extra)
    assert (tmp_path / "x/generation_config.json").read_text() == '{"top_p": 0.95}'
    assert (tmp_path / "x/tokenizer.json").read_text() == "{}"
    for name in ("config.json", "../x", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        with pytest.raises(CheckpointError, match="extra file is"):
            saved(tmp_path / "y", small(), extra_files={name: b""})
    assert not (tmp_path / "y").exists()


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    config = small()
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_checkpoint(tmp_path, config, tensors.items())
    assert holds(tmp_path, tensors)


def test_transposed_and_grad_tensors_are_written_by_value(tmp_path: Path) -> None:
    config = small()
    tensors = random_tensors(config)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].t().contiguous().t().requires_grad_()
    save_checkpoint(tmp_path, config, tensors.items())
    assert holds(tmp_path, {**tensors, name: tensors[name].detach()})


Q_A = "model.layers.0.self_attn.q_a_proj.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        ({Q_A: None}, f"1 tensors never came \\({Q_A}\\)"),
        ({Q_A: torch.zeros(64, 40)}, rf"{Q_A} is \[64, 40\], needs \[40, 64\]"),
        ({Q_A: torch.zeros(40, 64, dtype=torch.int64)}, f"{Q_A} is torch.int64, needs"),
        ({Q_A + "_scale_inv": torch.zeros(2, 1)}, r"scale_inv is \[2, 1\], needs \[1, 1\]"),
        ({"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(4, 48, 64)}, "gate_up_proj is unexpected"),
    ],
)
@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 60_000])
def test_refusals_leave_the_old_checkpoint_alone(
    tmp_path: Path, change: dict[str, Tensor | None], message: str, shard_bytes: int
) -> None:
    config = small()
    old = saved(tmp_path, config, seed=1)
    before = files(tmp_path)
    tensors = {**random_tensors(config, seed=2), **change}
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path, config, [(k, v) for k, v in tensors.items() if v is not None], shard_bytes)
    assert files(tmp_path) == before
    assert holds(tmp_path, old)


def test_a_name_that_comes_twice(tmp_path: Path) -> None:
    config = small()
    tensors = [*random_tensors(config).items()]
    with pytest.raises(CheckpointError, match="came twice"):
        save_checkpoint(tmp_path / "x", config, [*tensors, tensors[3]])
    assert not (tmp_path / "x").exists()


def test_a_producer_that_fails_midway(tmp_path: Path) -> None:
    config = small()
    old = saved(tmp_path, config, seed=1, max_shard_bytes=60_000)
    before = files(tmp_path)

    def failing() -> Iterator[tuple[str, Tensor]]:
        tensors = list(random_tensors(config, seed=2).items())
        yield from tensors[:-1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, config, failing(), 60_000)
    assert files(tmp_path) == before
    assert holds(tmp_path, old)


@pytest.mark.parametrize("first, second", [(60_000, 5_000_000_000), (5_000_000_000, 60_000), (30_000, 60_000)])
def test_saving_over_another_layout_leaves_nothing_stale(tmp_path: Path, first: int, second: int) -> None:
    config = small()
    saved(tmp_path, config, seed=1, max_shard_bytes=first)
    (tmp_path / "notes.txt").write_text("mine")
    new = saved(tmp_path, config, seed=2, max_shard_bytes=second)
    assert holds(tmp_path, new)
    assert (tmp_path / "notes.txt").exists()
    assert open_checkpoint(tmp_path).nbytes == sum(t.numel() * t.element_size() for t in new.values())


@pytest.mark.parametrize("crash_at", range(12))
def test_a_crash_while_renaming_never_leaves_a_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    """Whatever rename is the last one, what opens is the old or the new checkpoint, whole; or nothing opens."""
    config = small()
    shard = 500_000
    old = saved(tmp_path, config, seed=1, max_shard_bytes=shard)
    done = 0
    replace = os.replace

    def crashing(a: str, b: str) -> None:
        nonlocal done
        if done == crash_at:
            raise OSError("power cut")
        done += 1
        replace(a, b)

    monkeypatch.setattr(checkpoint_save.os, "replace", crashing)
    try:
        new = saved(tmp_path, config, seed=2, max_shard_bytes=shard)
    except OSError:
        new = random_tensors(config, seed=2)
    try:
        checkpoint = open_checkpoint(tmp_path)
    except CheckpointError:
        return
    found = {spec.name: tensor.clone() for spec, tensor in checkpoint.tensors(torch.float32)}
    assert any(all(torch.equal(found[name], tensors[name]) for name in found) for tensors in (old, new))
