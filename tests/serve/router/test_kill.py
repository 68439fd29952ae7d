"""A replica is killed under load: no truncated stream goes untold, no wrong token, the rest goes elsewhere."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import httpx
from fake_replica import serving, words

from glm5sdk.serve.router import HealthRules, RouterSettings, create_router

SCRIPT = Path(__file__).parents[1] / "fake_replica.py"


async def start(model: str) -> tuple[asyncio.subprocess.Process, str]:
    process = await asyncio.create_subprocess_exec(sys.executable, str(SCRIPT), model, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    return process, (await process.stdout.readline()).decode().strip()


async def stream(client: httpx.AsyncClient, number: int) -> tuple[str, str]:
    """Returns how the stream ended, and the replica; checks every token on the way."""
    expected, got, home = words(f'"{number}"', 40), [], ""
    body = {"prompt": f"{number}", "max_tokens": 40, "delay": 0.02, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        home = answer.headers.get("x-glm5-replica", "")
        if answer.status_code != 200:
            return f"status {answer.status_code}", home
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                assert got == expected
                return "done", home
            if line:
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    assert event["error"]["code"] == "replica_lost"
                    return "told", home
                got.append(event["text"])
                assert got == expected[: len(got)]
    return "silent", home


def test_killed_under_load() -> None:
    async def run() -> None:
        (a, url_a), (b, url_b) = await asyncio.gather(start("a"), start("b"))
        try:
            rules = HealthRules(interval=0.5, timeout=2.0, first_recheck=0.1)
            router = create_router(RouterSettings(replicas=(url_a, url_b), health=rules))
            async with (
                serving(router) as front,
                httpx.AsyncClient(base_url=front, trust_env=False, timeout=30) as client,
            ):
                before = [asyncio.create_task(stream(client, i)) for i in range(16)]
                while not all(r.in_flight >= 4 for r in router.fleet):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.2)
                a.send_signal(signal.SIGKILL)
                during = [asyncio.create_task(stream(client, i)) for i in range(100, 116)]
                ended = await asyncio.gather(*before)
                assert {how for how, home in ended if home == url_a} == {"told"}
                assert {how for how, home in ended if home == url_b} == {"done"}
                later = await asyncio.gather(*during)
                # Sent in the very moment of the kill, a few may have reached the dying process.
                assert all(how == "done" or home == "" or home == url_a for how, home in later)
                assert sum(how == "done" for how, _ in later) >= 12
                assert not router.fleet.need(url_a).health.up
                again = await asyncio.gather(*(stream(client, i) for i in range(200, 208)))
                assert set(again) == {("done", url_b)}
        finally:
            for process in (a, b):
                if process.returncode is None:
                    process.kill()
                await process.wait()

    asyncio.run(run())
