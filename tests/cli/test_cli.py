"""The glm5 command, run as a person runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from glm5sdk.models.glm5 import Glm5ForCausalLM, preset

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny model with a byte tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"])
    torch.manual_seed(0)
    config = preset("tiny", vocab_size=272, num_hidden_layers=2, num_nextn_predict_layers=0, eos_token_id=(256,))
    Glm5ForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def glm5(*arguments: object, text: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glm5sdk.cli", *map(str, arguments)]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "200", **env}
    )


def test_help_and_version() -> None:
    done = glm5("--help")
    assert done.returncode == 0
    for command in ("doctor", "matrix", "generate", "chat", "train", "convert", "quantize"):
        assert command in done.stdout
    assert glm5("--version").stdout.startswith("glm5sdk 0.")


def test_doctor_reports_backends_and_tests_itself() -> None:
    done = glm5("doctor")
    assert done.returncode == 0, done.stderr
    assert "reference" in done.stdout
    assert "is off by" not in done.stdout


def test_doctor_names_a_wrong_choice() -> None:
    done = glm5("doctor", GLM5SDK_BACKENDS="nosuch")
    assert done.returncode == 2
    assert "nosuch" in done.stderr
    assert "Traceback" not in done.stderr


def test_matrix_lists_every_op() -> None:
    from glm5sdk import ops

    done = glm5("matrix", "--markdown")
    assert done.returncode == 0
    assert all(f"`{name}`" in done.stdout for name in ops.__all__)


def test_generate_streams_the_prompt_and_its_continuation(checkpoint: Path) -> None:
    done = glm5("generate", checkpoint, "def f(x):", "-n", 8, "--ignore-eos")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def f(x):")
    assert "9 prompt tokens, 8 new" in done.stderr
    again = glm5("generate", checkpoint, "-", "-n", 8, "--ignore-eos", text="def f(x):")
    assert again.stdout == done.stdout


def test_generate_with_the_reference(checkpoint: Path) -> None:
    done = glm5("generate", checkpoint, "abc", "-n", 3, "--ignore-eos", "--backend", "reference")
    assert done.returncode == 0, done.stderr


def test_chat_answers_each_line(checkpoint: Path) -> None:
    done = glm5("chat", checkpoint, "-n", 4, "--temperature", 0, text="hello\nmore\n\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tokens/s") == 2
    assert "<|user|>" not in done.stdout


def test_convert_changes_dtype_and_keeps_names(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    done = glm5("convert", checkpoint, tmp_path / "bf16", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    with (
        safe_open(str(checkpoint / "model.safetensors"), "pt") as a,
        safe_open(str(tmp_path / "bf16" / "model.safetensors"), "pt") as b,
    ):
        assert sorted(a.keys()) == sorted(b.keys())
        assert b.get_tensor("lm_head.weight").dtype == torch.bfloat16
    assert (tmp_path / "bf16" / "tokenizer.json").is_file()
    assert glm5("generate", tmp_path / "bf16", "x", "-n", 2).returncode == 0


def test_train_writes_model_and_plot(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for i in range(12):
        (text / f"{i}.txt").write_text("".join(f"line {j} of file {i}: the same words again\n" for j in range(400)))
    done = glm5("train", text, "--out", tmp_path / "run", "--steps", 6, "--batch-size", 2, "--seq-len", 48)
    assert done.returncode == 0, done.stderr
    assert "bits per byte" in done.stdout
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert glm5("generate", tmp_path / "run" / "model", "line 3", "-n", 4).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "/nowhere", "x"), "tokenizer.json"),
        (("generate", "{checkpoint}", ""), "prompt is empty"),
        (("generate", "{checkpoint}", "x", "--dtype", "int3"), "dtype is 'int3'"),
        (("generate", "{checkpoint}", "x", "--backend", "cpux"), "cpux"),
        (("convert", "{checkpoint}", "{checkpoint}"), "other than the source"),
        (("train", "/nowhere", "--out", "/tmp/never", "--steps", "1"), "/nowhere"),
    ],
)
def test_errors_are_one_sentence(checkpoint: Path, arguments: tuple[str, ...], words: str) -> None:
    done = glm5(*(a.format(checkpoint=checkpoint) for a in arguments))
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
