"""Ten thousand requests over HTTP, a fifth of them left by their clients: memory and pages stay."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from asking import ask, stream
from real_server import Offline, RealServer, serving, until

WARM_UP, REQUESTS, AT_ONCE = 1_000, 10_000, 32
SLACK_BYTES = 24 << 20  # what allocators of two threads round; three kilobytes a request would be more
DISTINCT = 200  # so many requests are checked against the offline engine, and come again and again


@pytest.mark.full  # minutes: shorter runs cannot tell a small leak from the moods of an allocator
def test_ten_thousand_requests(fault_model: Path, tmp_path: Path, offline: Offline) -> None:
    options = ("--num-pages", "128", "--max-num-seqs", "16")
    with serving(fault_model, tmp_path / "log", *options) as server:
        asyncio.run(soak(server, offline, WARM_UP))
        assert until(server.at_rest)
        before = server.resident_bytes()
        left = asyncio.run(soak(server, offline, REQUESTS - WARM_UP))
        assert until(server.at_rest), server.stats()
        assert server.resident_bytes() - before < SLACK_BYTES, (before, server.resident_bytes())
        assert (REQUESTS - WARM_UP) * 0.15 < left < (REQUESTS - WARM_UP) * 0.25


async def soak(server: RealServer, offline: Offline, requests: int) -> int:
    """Make so many; returns how many were left. Every answer that came whole must be right."""
    draw, numbers, left = random.Random(requests), iter(range(requests)), 0

    async def one(client: httpx.AsyncClient, number: int) -> bool:
        leave = draw.random() < 0.2
        way = draw.randrange(3)
        if leave and way:
            await stream(client, number, 40, most=draw.randrange(1, 4))
        elif leave:
            with suppress(TimeoutError):
                async with asyncio.timeout(draw.random() * 0.02):
                    await ask(client, number, 40)
        else:
            said = await (ask if way else stream)(client, number, 1 + number % 4)
            assert said.how == "done" and said.tokens == offline.tokens(number, 1 + number % 4), said
        return leave

    async def some(client: httpx.AsyncClient) -> None:
        nonlocal left
        for number in numbers:
            if await one(client, number % DISTINCT):
                left += 1

    async with server.async_client() as client:
        await asyncio.gather(*(some(client) for _ in range(AT_ONCE)))
    return left
