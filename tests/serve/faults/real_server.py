"""Servers as processes of their own, what is asked of them, and the offline engine that says what is right."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from server_fakes import make_tokenizer

from glm5sdk.models.glm5 import Glm5ForCausalLM, preset
from glm5sdk.serve import LLM
from glm5sdk.serve.params import SamplingParams

VOCAB = 512
ADMIN = {"authorization": "Bearer the-admin-key"}
START_SECONDS = 90.0


def save_model(folder: Path, seed: int) -> Path:
    """A tiny model of random weights with a byte tokenizer."""
    torch.manual_seed(seed)
    config = preset("tiny", vocab_size=VOCAB, num_hidden_layers=2, num_nextn_predict_layers=0, eos_token_id=(256,))
    Glm5ForCausalLM(config.replace(initializer_range=0.1)).save_pretrained(folder)
    make_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def prompt_of(number: int) -> list[int]:
    """A prompt of its own for each number, some sharing a beginning; several pages at most."""
    return [3 + number % 5] * 70 * (number % 2) + [10 + (number * 7 + i * i) % 240 for i in range(4 + number % 13)]


def body_of(number: int, tokens: int = 12, **more: Any) -> dict[str, Any]:
    """The completion request of a number."""
    return {
        "prompt": prompt_of(number), "max_tokens": tokens, "temperature": 1.0, "seed": number, "ignore_eos": True,
        "return_token_ids": True, **more,
    }  # fmt: skip


class Offline:
    """The offline engine over one checkpoint; remembers what it said."""

    def __init__(self, folder: Path) -> None:
        self._llm = LLM(folder, num_pages=256)
        self._said: dict[tuple[int, int, int], list[int]] = {}

    def tokens(self, number: int, tokens: int = 12, prompt: list[int] | None = None) -> list[int]:
        """Of `body_of(number, tokens)`, or of a prompt in place of the number's; its length tells prompts apart."""
        prompt = prompt_of(number) if prompt is None else prompt
        if (key := (number, tokens, len(prompt))) not in self._said:
            params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=number, ignore_eos=True)
            self._said[key] = self._llm.generate([prompt], params)[0].outputs[0].token_ids
        return self._said[key]


@dataclass
class RealServer:
    """A running server.

    Attributes:
        process: the one that was started.
        url: of its port.
        log: what it wrote.
    """

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def client(self, **settings: Any) -> httpx.Client:
        """A client that no proxy variable of the environment diverts."""
        return httpx.Client(base_url=self.url, **{"timeout": 30, "trust_env": False, "headers": ADMIN, **settings})

    def async_client(self, **settings: Any) -> httpx.AsyncClient:
        """The same for event loops, with as many connections as are asked for."""
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(
            base_url=self.url, limits=limits, **{"timeout": 60, "trust_env": False, "headers": ADMIN, **settings}
        )

    def stats(self) -> dict[str, Any]:
        """Of the engine."""
        with self.client() as client:
            return client.get("/admin/stats").json()["stats"]

    def at_rest(self) -> bool:
        """Nothing runs or waits, and every page can be had."""
        stats = self.stats()
        return not stats["running"] and not stats["waiting"] and stats["pages_free"] == stats["pages_total"]

    def resident_bytes(self) -> int:
        """Memory of the process."""
        return resident_bytes(self.process.pid)

    def raw(self, data: bytes, seconds: float = 10.0, half_close: bool = False) -> bytes:
        """Bytes to the port, and what comes back until the server closes or falls silent."""
        with socket.create_connection(self.address, timeout=seconds) as link:
            with suppress(OSError):  # it may refuse before it has read everything
                link.sendall(data)
                if half_close:
                    link.shutdown(socket.SHUT_WR)
            seen = b""
            with suppress(OSError):
                while piece := link.recv(65536):
                    seen += piece
                    link.settimeout(0.3)
            return seen


def post(path: str, body: bytes | dict[str, Any], *headers: str, method: str = "POST") -> bytes:
    """A request in bytes, that closes its connection."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(content)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content


def status_of(answer: bytes) -> int:
    """Of an answer in bytes; 0 when there is none."""
    found = re.match(rb"HTTP/1\.[01] (\d{3})", answer)
    return int(found[1]) if found else 0


def serving(folder: Path, log: Path, *arguments: str, **environment: str) -> AbstractContextManager[RealServer]:
    """`glm5 serve` on a free port; everything it started is gone afterwards."""
    return _running(log, ("serve", str(folder), *arguments), environment)


def routing(log: Path, *arguments: str, **environment: str) -> AbstractContextManager[RealServer]:
    """`glm5 route` on a free port, with the admin key of the servers."""
    return _running(log, ("route", *arguments), environment)


@contextmanager
def _running(log: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> Iterator[RealServer]:
    command = [sys.executable, "-m", "glm5sdk.cli", *arguments, "--port", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT,
            env={**os.environ, "GLM5SDK_ADMIN_KEY": "the-admin-key", "GLM5SDK_API_KEY": "", **environment},
        )  # fmt: skip
    try:

        def announced() -> list[str]:
            return re.findall(r"http://127\.0\.0\.1:\d+", log.read_text())

        assert until(lambda: bool(announced()) or process.poll() is not None, START_SECONDS)
        assert process.poll() is None, log.read_text()
        running = RealServer(process, announced()[0], log)
        with running.client() as client:
            assert until(lambda: client.get("/health").status_code == 200, START_SECONDS), log.read_text()
        yield running
    finally:
        for pid in [process.pid, *descendants(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(30)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait until a function is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def descendants(pid: int) -> list[int]:
    """Processes below one, from all of its threads."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
