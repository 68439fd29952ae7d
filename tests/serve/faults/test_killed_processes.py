"""kill -9 of a replica and of the front, with real engines behind them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest
from asking import Said, ask, stream
from real_server import Offline, RealServer, alive, descendants, serving

LONG = 300


async def replicas_up(client: httpx.AsyncClient, count: int) -> list[str]:
    async with asyncio.timeout(90):
        while True:
            told = (await client.get("/admin/replicas")).json()["replicas"]
            if len(up := [r["replica"] for r in told if r["up"]]) == count:
                return up
            await asyncio.sleep(0.05)


def right(said: Said, offline: Offline) -> bool:
    """The tokens are those of the offline engine, all or the first of them."""
    expected = offline.tokens(said.number, said.asked)
    return said.tokens == (expected if said.how == "done" else expected[: len(said.tokens)])


@pytest.mark.full  # five processes are started, one after another three times
def test_a_replica_and_then_the_front(fault_model: Path, tmp_path: Path, offline: Offline) -> None:
    """What ran on the dead replica is told so; all else is right; it comes back; nobody outlives the front."""
    numbers = range(16)
    for number in numbers:
        offline.tokens(number, LONG)

    async def under_load(server: RealServer) -> None:
        async with server.async_client() as client:
            before = await replicas_up(client, 2)
            seen: list[int] = []
            streams = [asyncio.create_task(stream(client, i, LONG, seen=seen)) for i in numbers]
            whole = [asyncio.create_task(ask(client, i, LONG)) for i in numbers[:6]]
            async with asyncio.timeout(30):
                while len(seen) < len(numbers):
                    await asyncio.sleep(0.005)
            victim = int(Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()[0])
            os.kill(victim, signal.SIGKILL)
            answers = await asyncio.gather(*streams)
            others = await asyncio.gather(*whole)
            for said in [*answers, *others]:
                assert said.how in ("done", "told", "status 502"), said
                assert right(said, offline), said
                if said.how != "done":
                    assert said.error["code"] == "replica_lost", said
            lost = {said.home for said in answers if said.how == "told"}
            assert len(lost) == 1 and lost < set(before), "the streams of one replica were told"
            again = await asyncio.gather(*(ask(client, 100 + i, 4) for i in range(8)))
            assert all(said.how == "done" and right(said, offline) for said in again), again
            after = await replicas_up(client, 2)
            assert len(set(after) & set(before)) == 1 and not lost & set(after)
            homes = await asyncio.gather(*(ask(client, 200 + i, 4, user=f"u{i}") for i in range(12)))
            assert all(said.how == "done" and right(said, offline) for said in homes)
            assert {said.home for said in homes} == set(after)

    with serving(fault_model, tmp_path / "log", "--dp", "2", "--num-pages", "128", "--max-num-seqs", "8") as server:
        asyncio.run(under_load(server))
        everyone = descendants(server.process.pid)
        assert len(everyone) >= 2
        server.process.kill()
        server.process.wait(10)
        for _ in range(100):
            if not (left := [pid for pid in everyone if alive(pid)]):
                break
            asyncio.run(asyncio.sleep(0.05))
        assert not left


@pytest.mark.full  # as above
def test_one_of_two_that_share_the_experts(fault_model: Path, tmp_path: Path, offline: Offline) -> None:
    """The group goes down as a whole: every stream is told, new requests are refused at once, and then it is back."""

    async def under_load(server: RealServer) -> None:
        async with server.async_client() as client:
            await replicas_up(client, 2)
            seen: list[int] = []
            streams = [asyncio.create_task(stream(client, i, LONG, seen=seen)) for i in range(8)]
            async with asyncio.timeout(30):
                while len(seen) < 8:
                    await asyncio.sleep(0.005)
            victim = int(Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()[0])
            os.kill(victim, signal.SIGKILL)
            async with asyncio.timeout(30):
                answers = await asyncio.gather(*streams)
            for said in answers:
                assert said.how == "told" and said.error["code"] in ("replica_lost", "engine_error"), said
                assert right(said, offline), said
            async with asyncio.timeout(10):
                refused = await ask(client, 1, 4)
            assert refused.how in ("status 503", "status 502"), refused
            await replicas_up(client, 2)
            again = await asyncio.gather(*(ask(client, 100 + i, 8, user=f"u{i}") for i in range(8)))
            assert all(said.how == "done" and right(said, offline) for said in again), again

    options = ("--dp", "2", "--ep", "2", "--num-pages", "128", "--max-num-seqs", "8")
    with serving(fault_model, tmp_path / "log", *options) as server:
        asyncio.run(under_load(server))
