"""Crowds: clients that leave at random, more of them than there is room for, and the same answers as offline."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from asking import Said, ask, stream
from real_server import Offline, RealServer, serving, until

LEAVERS = 60


def test_clients_that_leave_at_random(server: RealServer, offline: Offline) -> None:
    """In the queue, between tokens, with and without a stream: nothing is kept for them, nobody else notices."""
    draw = random.Random(7)

    async def leave(client, number: int) -> None:
        if draw.random() < 0.5:
            await stream(client, number, 60, most=draw.randrange(1, 30))
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(draw.random() * 0.4):
                await ask(client, number, 60)

    async def run() -> list[Said]:
        async with server.async_client() as client:
            stay = [
                asyncio.create_task((ask if i % 2 else stream)(client, 300 + i, 10 + i % 7))
                for i in range(LEAVERS // 2)
            ]
            gone = [asyncio.create_task(leave(client, i)) for i in range(LEAVERS)]
            await asyncio.gather(*gone)
            return await asyncio.gather(*stay)

    answers = asyncio.run(asyncio.wait_for(run(), 60))
    assert until(server.at_rest), server.stats()
    assert server.stats()["aborted"] > LEAVERS // 4
    for said in answers:
        assert said.how == "done" and said.tokens == offline.tokens(said.number, said.asked), said
    with server.client() as client:
        numbers = client.get("/metrics").text
    assert "glm5sdk_requests_running 0.0" in numbers or "running 0.0" in numbers


@pytest.fixture(scope="module")
def narrow(fault_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Two at once, three in the queue."""
    log = tmp_path_factory.mktemp("narrow") / "log"
    with serving(fault_model, log, "--max-num-seqs", "2", "--max-queued-requests", "3", "--num-pages", "32") as running:
        yield running


def test_overload_is_told_and_starves_nobody(narrow: RealServer, offline: Offline) -> None:
    """Too many are told so with whole seconds; who comes back is served in the end; all answers are right."""
    refused: list[Said] = []

    async def persist(client, number: int) -> Said:
        while True:
            said = await (ask if number % 2 else stream)(client, number, 16)
            if said.how != "status 429":
                return said
            refused.append(said)
            await asyncio.sleep(0.05 + number % 5 / 50)

    async def run() -> list[Said]:
        async with narrow.async_client() as client:
            async with asyncio.timeout(50):
                return await asyncio.gather(*(persist(client, i) for i in range(40)))

    answers = asyncio.run(run())
    assert len(refused) >= 10
    for said in refused:
        assert said.error["type"] == "rate_limit_error" and said.headers["retry-after"].isdecimal()
        assert 1 <= int(said.headers["retry-after"]) <= 60
    for said in answers:
        assert said.how == "done" and said.tokens == offline.tokens(said.number, 16), said
    assert until(narrow.at_rest), narrow.stats()


def test_what_can_never_fit_is_not_told_to_come_back(narrow: RealServer) -> None:
    with narrow.client() as client:
        for more in ({"n": 10**9}, {"n": 129}, {"max_tokens": 10**6}, {"prompt": [1] * 100_000}):
            answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, **more})
            assert answer.status_code == 400, (more, answer.text[:200])
    assert until(narrow.at_rest), narrow.stats()
