"""`glm5 route` as a process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys

import httpx
import pytest
from fake_replica import FakeReplica, serving
from typer.testing import CliRunner

from glm5sdk.cli.app import app
from glm5sdk.core.errors import ContractError


async def command(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "glm5sdk.cli", "route", *arguments, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT, env={**os.environ, **environment},
    )  # fmt: skip


def test_serves_until_a_signal_and_finishes_what_runs() -> None:
    async def run() -> None:
        replica = FakeReplica()
        async with serving(replica.app) as url:
            process = await command("--replica", url, "--port", "0", GLM5SDK_API_KEY="k", GLM5SDK_ADMIN_KEY="a")
            assert process.stdout is not None
            try:
                line = (await process.stdout.readline()).decode()
                front = re.match(r"glm5 route: (http://127\.0\.0\.1:\d+) in front of 1 replicas", line)
                assert front is not None, line + (await process.stdout.read()).decode()
                async with httpx.AsyncClient(base_url=front[1], timeout=20) as client:
                    body = {"prompt": "a", "max_tokens": 20, "delay": 0.03}
                    assert (await client.post("/v1/completions", json=body)).status_code == 401
                    client.headers["authorization"] = "Bearer k"
                    slow = asyncio.create_task(client.post("/v1/completions", json=body))
                    while not replica.running:
                        await asyncio.sleep(0.01)
                    process.send_signal(signal.SIGTERM)
                    assert (await slow).status_code == 200
                assert await asyncio.wait_for(process.wait(), 10) == 0
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "replicas is empty"),
        (("--replica", "localhost:80"), "needs a URL like"),
        (("--replica", "http://a:1", "--bound", "0.5"), "bound is 0.5"),
        (("--replica", "http://a:1", "--prefill", "http://b:1"), "admin_key is not given"),
    ],
)
def test_refuses(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(app, ["route", *arguments, "--port", "0"])
    assert isinstance(result.exception, ContractError)
    assert words in str(result.exception)
