"""`glm5 quantize`, as a person runs it: a checkpoint that loads, a true report, errors before anything is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.models.glm5 import Glm5ForCausalLM, preset
from glm5sdk.train import TrainConfig, train


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny model with MTP and a byte tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|user|>"])
    torch.manual_seed(0)
    config = preset("tiny", vocab_size=272, num_hidden_layers=2, eos_token_id=(256,))
    Glm5ForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_text("the quick brown fox jumps over the lazy dog; " * 40)
    return file


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "glm5sdk.cli", *map(str, arguments)]


def glm5(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "200"}
    )


def test_end_to_end(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    """Quantise in bfloat16, read the report, load, generate, convert, and be refused a second time and by train."""
    out = tmp_path / "out"
    arguments = ("--scheme", "w4a8-experts", "--out", out, "--calibration", text, "--tokens", 256)
    done = glm5("quantize", checkpoint, *arguments, "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    for words in ("output error by layer", "experts", "nearest rounding", "KL", "perplexity", "-7"):
        assert words in done.stdout
    report = json.loads((out / "quantization_report.json").read_text())
    assert (report["scheme"], report["method"], report["calibration_tokens"]) == ("w4a8-experts", "gptq", 256)
    assert 0 < report["divergence"]["kl_mean"] < 0.1
    assert report["bytes_after"]["total"] < 0.7 * report["bytes_before"]["total"]
    model = Glm5ForCausalLM.from_pretrained(out)
    assert model.weight_kinds == {"w8a8", "w4a8"}
    held = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    assert report["bytes_after"]["total"] == held

    written = glm5("generate", out, "the quick", "-n", 4, "--ignore-eos")
    assert written.returncode == 0, written.stderr
    assert written.stdout.startswith("the quick")
    again = glm5("quantize", out, "--scheme", "fp8", "--out", tmp_path / "twice")
    assert again.returncode == 2
    assert "is w4a8, w8a8 already, needs float weights" in again.stderr
    assert not (tmp_path / "twice").exists()
    converted = glm5("convert", out, tmp_path / "copy")
    assert converted.returncode == 0, converted.stderr
    assert "bfloat16, w4a8, w8a8" in converted.stdout
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    with pytest.raises(ContractError, match="are w4a8, w8a8, needs float ones"):
        train(TrainConfig(data=[Path(__file__), Path(__file__).with_name("test_cli.py")], start=out, seq_len=64))


@pytest.mark.parametrize(
    "options, message",
    [
        (("--scheme", "int3"), "scheme is 'int3', needs one of w8a8, w4a8-experts, fp8"),
        (("--scheme", "w8a8", "--method", "best"), "method is 'best', needs one of rtn, search, gptq"),
        (("--scheme", "w8a8", "--tokens", "0"), "tokens is 0, needs at least 1"),
        (("--scheme", "w8a8", "--calibration", "/nowhere"), "/nowhere does not exist"),
    ],
)
def test_wrong_options_are_named_and_nothing_is_written(
    checkpoint: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    done = glm5("quantize", checkpoint, "--out", tmp_path / "out", *options)
    assert done.returncode == 2
    assert message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_wrong_folders_texts_and_models_are_named(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    """In this process: each is refused before the model is loaded or changed."""
    from rich.console import Console

    from glm5sdk.cli.quantize import quantize_checkpoint

    def run(source: Path, out: Path, calibration: Path, scheme: str = "w8a8") -> None:
        quantize_checkpoint(Console(), source, scheme, out, calibration, 256, "rtn", "auto", "cpu", [])

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(ContractError, match="full exists and is not empty"):
        run(checkpoint, tmp_path / "full", text)
    assert [f.name for f in (tmp_path / "full").iterdir()] == ["file"]
    with pytest.raises(ContractError, match="exists and is not empty, needs a new or empty folder"):
        run(checkpoint, text, text)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ContractError, match="calibration text is 0 tokens long"):
        run(checkpoint, tmp_path / "out", tmp_path / "empty.txt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ContractError, match="folder holds no file"):
        run(checkpoint, tmp_path / "out", tmp_path / "folder")
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        run(tmp_path / "folder", tmp_path / "out", text)
    narrow = tmp_path / "narrow"
    Glm5ForCausalLM(preset("tiny", vocab_size=272, num_hidden_layers=2, moe_intermediate_size=64)).save_pretrained(
        narrow
    )
    (narrow / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    with pytest.raises(ContractError, match="moe_intermediate_size is 64, needs at least 128"):
        run(narrow, tmp_path / "out", text, "w4a8-experts")
    assert not (tmp_path / "out").exists()


def test_a_killed_run_leaves_nothing_that_loads(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    """Killed when every file is written and none is in its place."""
    out = tmp_path / "out"
    code = (
        "import os, signal; from glm5sdk.models.glm5 import checkpoint_save as c; "
        "c._commit = lambda *a: os.kill(os.getpid(), signal.SIGKILL); from glm5sdk.cli import main; main()"
    )
    arguments = ("--scheme", "w8a8", "--method", "rtn", "--out", out, "--calibration", text, "--tokens", 64)
    done = subprocess.run(
        [sys.executable, "-c", code, "quantize", *map(str, (checkpoint, *arguments))], capture_output=True, timeout=300
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert any(out.iterdir())
    with pytest.raises(CheckpointError):
        Glm5ForCausalLM.from_pretrained(out)
