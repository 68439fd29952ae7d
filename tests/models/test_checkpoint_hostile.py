"""Checkpoints that chance or malice has changed: one kind of error, and never another model unnoticed."""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.models.glm5 import Glm5ForCausalLM
from glm5sdk.models.glm5.presets import preset

SIZES = {
    "hidden_size": 8, "vocab_size": 16, "num_hidden_layers": 2, "q_lora_rank": 8, "kv_lora_rank": 8,
    "intermediate_size": 8, "moe_intermediate_size": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "index_head_dim": 8, "n_routed_experts": 4,
}  # fmt: skip
NUMBERS = [
    b"99999999999999999999", b"-1", b"1e400", b"NaN", b"true", b"null", b'"x"', b"1.5", b"[]", b"{}", b"0",
    b"18446744073709551615", b"1" * 5000, b"1" * 300,
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    Glm5ForCausalLM(preset("tiny", **SIZES)).save_pretrained(folder, max_shard_bytes=8000)
    return folder


def flip(data: bytearray, end: int, rng: random.Random) -> bytes:
    data[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return data


def another_digit(data: bytearray, end: int, rng: random.Random) -> bytes:
    data[rng.choice([i for i in range(end) if 48 <= data[i] < 58] or [0])] = 48 + rng.randrange(10)
    return data


def truncate(data: bytearray, end: int, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def extend(data: bytearray, end: int, rng: random.Random) -> bytes:
    return data + bytes(rng.randrange(1, 9))


def cut(data: bytearray, end: int, rng: random.Random) -> bytes:
    at = rng.randrange(end)
    return data[:at] + data[at + rng.randrange(1, 20) :]


def repeat(data: bytearray, end: int, rng: random.Random) -> bytes:
    at = rng.randrange(end)
    return data[: at + rng.randrange(1, 20)] + data[at:]


def another_number(data: bytearray, end: int, rng: random.Random) -> bytes:
    found = list(re.finditer(rb"\d+", data[:end]))
    if not found:
        return data
    place = rng.choice(found)
    return data[: place.start()] + rng.choice(NUMBERS) + data[place.end() :]


def nest(data: bytearray, end: int, rng: random.Random) -> bytes:
    return b"[" * 100_000


@pytest.mark.parametrize("change", [flip, another_digit, truncate, extend, cut, repeat, another_number, nest])
@pytest.mark.parametrize("kind", ["config.json", "model.safetensors.index.json", "shard"])
def test_damage(checkpoint: Path, tmp_path: Path, kind: str, change: Callable[..., bytes]) -> None:
    """Whatever loads after damage to index or header is the same model; a changed config may be another legal one."""
    rng = random.Random(f"{kind} {change.__name__}")
    want = Glm5ForCausalLM.from_pretrained(checkpoint).state_dict()
    work = shutil.copytree(checkpoint, tmp_path / "model")
    for _ in range(1 if change is nest else 12):
        name = rng.choice(sorted(p.name for p in work.glob("*.safetensors"))) if kind == "shard" else kind
        whole = (checkpoint / name).read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little") if kind == "shard" else len(whole)
        damaged = bytes(change(bytearray(whole), header, rng))
        (work / name).write_bytes(damaged)
        try:
            got = Glm5ForCausalLM.from_pretrained(work).state_dict()
        except (CheckpointError, ContractError) as error:
            assert str(error)  # noqa: PT017  any other exception fails the test
        else:
            same = got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)
            assert kind == "config.json" or same, f"{name} loads as another model"
        (work / name).write_bytes(whole)


@pytest.mark.parametrize("place", ["file", "missing", "empty", "unrelated"])
def test_places_that_hold_no_checkpoint(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    if place == "file":
        path.write_text("{}")
    elif place != "missing":
        path.mkdir()
        (path / "config.json").write_text("" if place == "empty" else '{"model_type": "bert"}')
    with pytest.raises((CheckpointError, ContractError), match="needs"):
        Glm5ForCausalLM.from_pretrained(path)


def test_saving_to_a_file_or_below_one(checkpoint: Path, tmp_path: Path) -> None:
    model = Glm5ForCausalLM.from_pretrained(checkpoint)
    (tmp_path / "file").write_text("kept")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="needs a folder"):
            model.save_pretrained(target)
    assert (tmp_path / "file").read_text() == "kept"


def test_a_killed_save_leaves_one_whole_checkpoint_or_none(checkpoint: Path, tmp_path: Path) -> None:
    """Killed while it writes: the old one. Killed between renames: an error. Never a mix, never another model."""
    code = (
        "import sys, torch; from glm5sdk.models.glm5 import Glm5ForCausalLM\n"
        "model = Glm5ForCausalLM.from_pretrained(sys.argv[1])\n"
        "for p in model.parameters(): p.data.fill_(0.5)\n"
        "print('saving', flush=True)\n"
        "while True: model.save_pretrained(sys.argv[2], max_shard_bytes=8000)"
    )
    work = shutil.copytree(checkpoint, tmp_path / "model")
    old = Glm5ForCausalLM.from_pretrained(checkpoint).lm_head.weight
    for delay in (0.0, 0.004, 0.02, 0.05):
        with subprocess.Popen([sys.executable, "-c", code, checkpoint, work], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"saving\n"
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            process.wait()
        try:
            found = Glm5ForCausalLM.from_pretrained(work)
        except CheckpointError:
            continue
        weights = {float(p.detach().flatten()[0]) for p in found.parameters()}
        assert weights == {0.5} or torch.equal(found.lm_head.weight, old)
    Glm5ForCausalLM.from_pretrained(checkpoint).save_pretrained(work)
    assert torch.equal(Glm5ForCausalLM.from_pretrained(work).lm_head.weight, old)
