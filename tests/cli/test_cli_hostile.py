"""The glm5 command against odd arguments, odd text and odd ends of its output: a sentence, never a traceback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from glm5sdk.models.glm5 import Glm5ForCausalLM, preset

COMMAND = [sys.executable, "-m", "glm5sdk.cli"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny model with a byte tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    Glm5ForCausalLM(preset("tiny", vocab_size=256, num_hidden_layers=2)).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def glm5(*arguments: object, text: bytes = b"", **options: object) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "COLUMNS": "200", **options.pop("env", {})}
    kept = {"stdout": subprocess.PIPE, **options}
    return subprocess.run(
        [*COMMAND, *map(os.fsencode, map(str, arguments))], input=text, stderr=subprocess.PIPE, timeout=120,
        env=environment, check=False, **kept,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        ("",), ("hi", "-n", "0"), ("hi", "-n", "1000000"), ("hi", "-t", "nan"), ("hi", "-t", "-1"),
        ("hi", "--seed", "99999999999999999999"), ("hi", "-b", "nope"), ("hi", "--dtype", "int3"), ("bad \udcff",),
        ("hi", "--top-p", "0"), ("hi", "--top-k", "99999999999"),
    ],
)  # fmt: skip
def test_refusals_are_one_sentence_and_no_output(checkpoint: Path, options: tuple[str, ...]) -> None:
    done = glm5("generate", checkpoint, *options)
    assert done.returncode == 2
    assert done.stdout == b""
    assert b"need" in done.stderr and b"Traceback" not in done.stderr


def test_bytes_that_are_no_text(checkpoint: Path) -> None:
    done = glm5("generate", checkpoint, "-", text=bytes(range(128, 256)))
    assert done.returncode == 2
    assert b"Unicode" in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.parametrize("target", ["a file", "below a file"])
def test_no_place_to_convert_to(checkpoint: Path, tmp_path: Path, target: str) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    done = glm5("convert", checkpoint, file if target == "a file" else file / "below")
    assert done.returncode == 2
    assert b"needs a folder" in done.stderr and b"Traceback" not in done.stderr
    assert file.read_text() == "kept"


def test_a_text_the_terminal_cannot_show(checkpoint: Path) -> None:
    done = glm5("generate", checkpoint, "h\u00e9llo", "-n", "2", env={"PYTHONIOENCODING": "ascii:strict"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"h\\xe9llo")


def test_output_that_cannot_be_written(checkpoint: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = glm5("generate", checkpoint, "hi", "-n", "2", stdout=full)
    assert done.returncode == 1
    assert b"No space left" in done.stderr and b"Traceback" not in done.stderr


def test_output_that_is_closed(checkpoint: Path) -> None:
    done = glm5("generate", checkpoint, "hi", "-n", "2", stdout=None, preexec_fn=lambda: os.close(1))
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("end", ["pipe", "interrupt"])
def test_a_reader_or_a_person_has_seen_enough(checkpoint: Path, end: str) -> None:
    words = [*COMMAND, "generate", str(checkpoint), "hi", "-n", "1000", "--ignore-eos"]
    # A job in the background of a shell ignores interrupts, and so would its children.
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(3)
        if end == "pipe":
            process.stdout.close()
        else:
            process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        code = process.wait(60)
        assert time.monotonic() - begin < 30
        text = process.stderr.read()
    assert code == (1 if end == "pipe" else 130)
    assert b"Traceback" not in text and b"Exception ignored" not in text


def test_templates_that_are_damaged(checkpoint: Path) -> None:
    for template in ("{% bad %}", "{{ messages[0].nope.deeper }}", "{{", 3):
        (checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        done = glm5("chat", checkpoint, "-n", "2", text=b"hi\n")
        assert done.returncode == 2, (template, done)
        assert b"Traceback" not in done.stderr


def test_a_port_that_cannot_be_had_is_told_before_a_model_is_loaded(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = glm5("serve", checkpoint, "--port", port)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}: Address already in use" in done.stderr.decode()
    assert b"chat template" not in done.stderr
    for port in (-1, 65536):
        done = glm5("serve", checkpoint, "--port", port)
        assert done.returncode == 2 and b"--port" in done.stderr
