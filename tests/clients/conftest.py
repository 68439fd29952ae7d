"""Programs that people run against servers, unchanged, in a virtual environment of their own, against `glm5 serve`.

`GLM5SDK_CLIENTS` names that environment's python; without it everything here is skipped. `GLM5SDK_CLIENTS_CHECKPOINT`
names a checkpoint with a tokenizer; without it a random tiny one is made.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_environment import outside

ENVIRONMENT = "GLM5SDK_CLIENTS"
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without clients there is nothing to run, and no server to start."""
    if not os.environ.get(ENVIRONMENT):
        mark = pytest.mark.skip(reason=f"{ENVIRONMENT} names no python that has the clients (make clients)")
        for item in items:
            if item.path.parent == HERE:
                item.add_marker(mark)


@pytest.fixture(scope="session")
def client_python() -> str:
    return os.environ[ENVIRONMENT]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if named := os.environ.get("GLM5SDK_CLIENTS_CHECKPOINT"):
        return Path(named)
    import torch
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    from glm5sdk.models.glm5 import Glm5ForCausalLM, preset

    folder = tmp_path_factory.mktemp("clients") / "checkpoint"
    torch.manual_seed(0)
    config = preset("tiny", vocab_size=320, num_hidden_layers=2, num_nextn_predict_layers=0, eos_token_id=(256,))
    Glm5ForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    roles = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in roles])
    backend.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    backend.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return folder


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `glm5 serve` as a process of its own."""
    log = tmp_path_factory.mktemp("server") / "log"
    command = [
        sys.executable, "-m", "glm5sdk.cli", "serve", str(checkpoint), "--port", "0",
        "--served-model-name", "checkpoint", "--api-key", "secret",
    ]  # fmt: skip
    with log.open("w") as sink, subprocess.Popen(command, stderr=sink, stdout=sink) as process:
        try:
            end = time.monotonic() + 120
            while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
                assert process.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.1)
            yield found.group()
            process.terminate()
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()


@pytest.fixture
def run_client(client_python: str, tmp_path: Path) -> Callable[[str, dict[str, Any]], Any]:
    """Run a script of this folder with the clients' python: JSON goes in by one file and comes back by another."""

    def run(script: str, job: dict[str, Any]) -> Any:
        asked, told = tmp_path / "asked.json", tmp_path / "told.json"
        asked.write_text(json.dumps(job))
        command = [client_python, str(HERE / script), str(asked), str(told)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path, env=outside()
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return json.loads(told.read_text())

    return run
