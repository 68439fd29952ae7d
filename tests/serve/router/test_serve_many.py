"""`glm5 serve --dp`: real processes on a small checkpoint, killed and counted."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import torch
from server_fakes import make_tokenizer

from glm5sdk.cli.serve_many import replica_command
from glm5sdk.models.glm5 import Glm5ForCausalLM, preset

BODY = {"prompt": "once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    Glm5ForCausalLM(preset("tiny", vocab_size=512)).save_pretrained(folder)
    make_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    return folder


def descendants(pid: int) -> list[int]:
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@asynccontextmanager
async def serving_many(folder: Path, *arguments: str) -> AsyncIterator[tuple[subprocess.Popen[str], httpx.AsyncClient]]:
    command = [sys.executable, "-m", "glm5sdk.cli", "serve", str(folder), "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "GLM5SDK_ADMIN_KEY": "a"})
    assert process.stdout is not None
    try:
        first = await asyncio.to_thread(process.stdout.readline)
        front = re.search(r"http://[0-9.:]+", first)
        assert front is not None, first
        async with httpx.AsyncClient(base_url=front[0], timeout=60) as client:
            client.headers["authorization"] = "Bearer a"
            yield process, client
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def replicas_up(client: httpx.AsyncClient, count: int) -> list[str]:
    async with asyncio.timeout(90):
        while True:
            told = (await client.get("/admin/replicas")).json()["replicas"]
            up = [r["replica"] for r in told if r["up"]]
            if len(up) == count:
                return up
            await asyncio.sleep(0.1)


# Most of the time is processes that import torch: three to five of them one after another.
@pytest.mark.parametrize("ep", [1, pytest.param(2, marks=pytest.mark.full)])
def test_two_replicas_behind_one_port(checkpoint: Path, ep: int) -> None:
    """Answers are equal whoever gives them; a killed replica comes back; at the end nobody is left."""

    async def run() -> None:
        async with serving_many(checkpoint, "--dp", "2", "--ep", str(ep), "--num-pages", "64") as (process, client):
            before = await replicas_up(client, 2)
            texts, homes = set(), set()
            for i in range(12):
                answer = await client.post("/v1/completions", json={**BODY, "user": f"u{i}"})
                texts.add(answer.json()["choices"][0]["text"])
                homes.add(answer.headers["x-glm5-replica"])
            assert (len(texts), homes) == (1, set(before))
            everyone = descendants(process.pid)
            victim = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
            os.kill(victim, signal.SIGKILL)
            while set(await replicas_up(client, 2)) == set(before):
                await asyncio.sleep(0.1)
            assert (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"] in texts
            everyone += descendants(process.pid)
            if ep == 1:
                process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait, 30) == 0
            else:
                process.kill()
            async with asyncio.timeout(10):
                while left := [pid for pid in everyone if alive(pid)]:
                    await asyncio.sleep(0.05)
            assert not left

    asyncio.run(run())


def test_a_replica_that_cannot_start_is_said() -> None:
    command = [sys.executable, "-m", "glm5sdk.cli", "serve", "no-such-folder", "--dp", "2", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "before it served" in done.stderr


def test_commands_of_replicas() -> None:
    typed = ["serve", "m", "--dp", "4", "--ep=2", "--port=80", "--host", "::", "--api-key", "k", "--max-num-seqs", "3",
             "--cluster"]  # fmt: skip
    made = replica_command(typed)
    assert made[1:] == ["-m", "glm5sdk.cli", "serve", "m", "--max-num-seqs", "3", "--host", "127.0.0.1", "--port", "0"]
