"""Over a real connection: clients that hang up, streams that arrive piece by piece, a process that is told to end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from live_server import live, until
from server_fakes import Bench, make_tokenizer

from glm5sdk.models.glm5 import Glm5ForCausalLM, preset

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def never() -> asyncio.Event:
    """A gate that stays shut; it belongs to no loop before it is waited for."""
    return asyncio.Event()


def hang_up(address: str, path: str, body: dict[str, Any], first: bytes) -> None:
    """Send a request, wait for some bytes of the answer, close."""
    host, port = address.removeprefix("http://").split(":")
    payload = json.dumps(body).encode()
    with socket.create_connection((host, int(port)), timeout=10) as link:
        link.sendall(
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(payload)}\r\n\r\n".encode()
            + payload
        )
        seen = b""
        while first not in seen:
            seen += link.recv(4096)


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
        ("/v1/messages", {**CHAT, "max_tokens": 50}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
@pytest.mark.parametrize("when", ["waiting", "between tokens", "streaming"])
def test_hanging_up_ends_the_work(path: str, body: dict[str, Any], when: str) -> None:
    bench = Bench("</think>abc")
    bench.engine.gate, bench.engine.held = never(), when == "waiting"
    prompts = len(body["prompt"]) if "prompt" in body else 1
    with live(bench) as address:
        if when == "streaming":
            hang_up(address, path, {**body, "stream": True}, b"data: ")
        else:
            host, port = address.removeprefix("http://").split(":")
            payload = json.dumps(body).encode()
            with socket.create_connection((host, int(port)), timeout=10) as link:
                link.sendall(
                    f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n".encode() + payload
                )
                assert until(lambda: len(bench.engine.requests) == prompts)
        assert until(lambda: len(set(bench.engine.aborted)) == prompts), "the engine was told"
        assert until(lambda: bench.service.in_flight == 0) and not bench.service.alive
        assert bench.service.admission.waiting_tokens == 0
        assert httpx.get(f"{address}/health").status_code == 200


def test_a_stream_arrives_as_it_is_made() -> None:
    bench = Bench("</think>abc")
    bench.engine.gate = never()
    with live(bench) as address, httpx.stream("POST", f"{address}/v1/chat/completions",
                                              json={**CHAT, "stream": True}, timeout=10) as answer:  # fmt: skip
        assert answer.headers["x-glm5-weight-version"] == "w1"
        lines = answer.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
        assert len(bench.engine.requests) == 1 and not bench.engine.aborted


def test_many_at_once_get_their_own_answers() -> None:
    bench = Bench(lambda prompt, index: f"</think>answer to {re.findall(r'<[|]user[|]>(.*?)<', prompt)[0]}")

    async def ask() -> list[str]:
        async with httpx.AsyncClient(timeout=60) as client:
            bodies = [{"messages": [{"role": "user", "content": f"q{i}"}], "stream": i % 2 == 0} for i in range(40)]
            answers = await asyncio.gather(
                *(client.post(f"{address}/v1/chat/completions", json=body) for body in bodies)
            )
            return [answer.text for answer in answers]

    with live(bench) as address:
        texts = asyncio.run(ask())
    for i, text in enumerate(texts):
        if i % 2:
            assert json.loads(text)["choices"][0]["message"]["content"] == f"answer to q{i}"
        else:
            chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line and "[DONE]" not in line]
            said = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
            assert said == f"answer to q{i}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny model with a byte tokenizer and no chat template."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = preset("tiny", vocab_size=320, num_hidden_layers=2, num_nextn_predict_layers=0, eos_token_id=(256,))
    Glm5ForCausalLM(config).save_pretrained(folder)
    make_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def test_the_command_serves_and_drains_on_sigterm(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "glm5sdk.cli", "serve", str(checkpoint), "--port", "0", "--served-model-name", "t"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, "GLM5SDK_API_KEY": "k1, k2"}) as process:  # fmt: skip
        try:
            address, lines = "", []
            for line in process.stderr or ():
                lines.append(line)
                if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                    address = found.group()
                    break
            assert address, lines
            assert any("built-in" in line for line in lines), "said in the log"
            head = {"authorization": "Bearer k2"}
            assert httpx.get(f"{address}/v1/models").status_code == 401
            body = {**CHAT, "max_tokens": 5, "ignore_eos": True, "model": "t"}
            answer = httpx.post(f"{address}/v1/chat/completions", json=body, headers=head, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 5
            card = httpx.get(f"{address}/v1/models", headers=head).json()["data"][0]
            long = {**body, "max_tokens": card["max_model_len"] - 50, "stream": True}
            with httpx.stream("POST", f"{address}/v1/chat/completions", json=long, headers=head, timeout=60) as stream:
                text = stream.iter_text()
                begun = next(text)
                process.send_signal(signal.SIGTERM)
                time.sleep(0.05)
                late = httpx.post(f"{address}/v1/chat/completions", json=body, headers=head, timeout=60)
                rest = begun + "".join(text)
            assert rest.rstrip().endswith("[DONE]") and '"finish_reason":"length"' in rest, "what ran was finished"
            assert late.status_code == 503
            assert process.wait(30) == 0
        finally:
            process.kill()
