"""Prompts computed by one server and answered by another, and kill -9 of either, or clients that leave, in between."""

from __future__ import annotations

import asyncio
import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from asking import Said, ask, stream
from real_server import Offline, RealServer, routing, serving, until

COUNT, TOKENS = 12, 40
LEASE_SECONDS = 30.0  # the router's default
# Well under a lease: pages that come back sooner were released, not forgotten until their time was over.
SOON = 12.0


def long_prompt(number: int) -> list[int]:
    """Several pages, of which no two numbers share the first."""
    return random.Random(number).choices(range(3, 250), k=500 + 13 * (number % 13))


def right(said: Said, offline: Offline) -> bool:
    """The tokens are the offline engine's, all or the first of them."""
    expected = offline.tokens(said.number, said.asked, long_prompt(said.number))
    return said.tokens == (expected if said.how == "done" else expected[: len(said.tokens)])


def told(said: Said) -> bool:
    """It ended in clear words: an event of the stream, or a status before there was one."""
    codes = {"told": ("replica_lost",), "status 502": ("replica_lost",), "status 503": ("no_replica",)}
    return said.error.get("code") in codes.get(said.how, ())


def counted(metrics: str, outcome: str) -> float:
    """Handoffs of that outcome."""
    found = re.search(rf'glm5_router_handoffs_total{{kind="prefill",outcome="{outcome}"}} ([0-9.]+)', metrics)
    return float(found[1]) if found else 0.0


@dataclass
class Split:
    """The processes; `more` decode as well."""

    prefill: RealServer
    decode: RealServer
    front: RealServer
    more: tuple[RealServer, ...] = ()

    def handed(self, outcome: str) -> float:
        """Handoffs of that outcome so far, as the router counts them."""
        with self.front.client() as client:
            return counted(client.get("/metrics").text, outcome)


@contextmanager
def split(folder: Path, logs: Path, decoders: int = 1) -> Iterator[Split]:
    """The prefill server takes small steps, so that handoffs are spread over seconds."""
    with ExitStack() as stack:
        options = ("--num-pages", "256", "--max-num-batched-tokens", "16", "--max-num-seqs", "8")
        prefill = stack.enter_context(serving(folder, logs / "prefill", *options))
        decode, *more = [
            stack.enter_context(serving(folder, logs / f"decode{i}", "--num-pages", "256")) for i in range(decoders)
        ]
        urls = [word for server in (decode, *more) for word in ("--decode", server.url)]
        front = stack.enter_context(routing(logs / "front", "--prefill", prefill.url, *urls))
        yield Split(prefill, decode, front, tuple(more))


async def kill_in_the_middle(servers: Split, victim: RealServer) -> list[Said]:
    """A dozen streams; the victim dies when some have begun, while other prompts are still on their way."""
    seen: list[int] = []
    async with servers.front.async_client() as client:
        streams = [
            asyncio.create_task(stream(client, i, TOKENS, seen=seen, prompt=long_prompt(i))) for i in range(COUNT)
        ]
        async with asyncio.timeout(30):
            while (moved := counted((await client.get("/metrics")).text, "moved")) < 3 or not seen:
                await asyncio.sleep(0.01)
        assert moved < COUNT, "all handoffs were over before the kill"
        victim.process.kill()
        async with asyncio.timeout(30):
            return await asyncio.gather(*streams)


async def kill_while_pinned(servers: Split, victim: RealServer) -> list[Said]:
    """A dozen streams whose prompts lie pinned, because the decode server stands still; then the victim dies."""
    async with servers.front.async_client() as client, servers.prefill.async_client() as beside:
        servers.decode.process.send_signal(signal.SIGSTOP)
        streams = [asyncio.create_task(stream(client, i, TOKENS, prompt=long_prompt(i))) for i in range(COUNT)]
        async with asyncio.timeout(30):
            while True:
                stats = (await beside.get("/admin/stats")).json()["stats"]
                pinned = stats["pages_total"] - stats["pages_free"]
                if not stats["running"] and not stats["waiting"] and pinned >= COUNT:
                    break
                await asyncio.sleep(0.05)
        victim.process.kill()
        async with asyncio.timeout(30):
            return await asyncio.gather(*streams)


def asked_again(servers: Split, first: int, count: int) -> list[Said]:
    """Whole answers to prompts that nobody has seen."""

    async def run() -> list[Said]:
        async with servers.front.async_client() as client:
            return await asyncio.gather(
                *(ask(client, i, 6, prompt=long_prompt(i)) for i in range(first, first + count))
            )

    return asyncio.run(run())


def learn(offline: Offline) -> None:
    """What will be asked, before anything has to be fast."""
    for number in range(COUNT):
        offline.tokens(number, TOKENS, long_prompt(number))


@pytest.mark.full  # three processes, as in the two below
def test_the_prefill_server_dies(fault_model: Path, tmp_path: Path, offline: Offline) -> None:
    """No answer is lost: the decode server computes the prompts itself, and the router says so."""
    learn(offline)
    with split(fault_model, tmp_path) as servers:
        answers = asyncio.run(kill_in_the_middle(servers, servers.prefill))
        assert [said for said in answers if said.how != "done" or not right(said, offline)] == []
        assert servers.handed("moved") >= 3 and servers.handed("failed") >= 1
        lost = servers.handed("failed") + servers.handed("no_replica")
        later = asked_again(servers, 100, 4)
        assert all(said.how == "done" and right(said, offline) for said in later), later
        assert servers.handed("failed") + servers.handed("no_replica") == lost + 4
        assert until(servers.decode.at_rest, SOON), servers.decode.stats()


@pytest.mark.full
def test_the_decode_server_dies(fault_model: Path, tmp_path: Path, offline: Offline) -> None:
    """Every stream is told; the pages that were pinned for it are free again before their lease is over."""
    learn(offline)
    with split(fault_model, tmp_path) as servers:
        answers = asyncio.run(kill_in_the_middle(servers, servers.decode))
        assert [said for said in answers if not right(said, offline)] == []
        assert [said for said in answers if said.how != "done" and not told(said)] == []
        assert {said.how for said in answers} >= {"told", "status 503"}, answers
        assert until(servers.prefill.at_rest, SOON), servers.prefill.stats()
        refused = asked_again(servers, 100, 2)
        assert all(said.how == "status 503" and told(said) for said in refused), refused
        with serving(fault_model, tmp_path / "second", "--num-pages", "256") as second:
            with servers.front.client() as client:
                assert client.post("/admin/replicas", json={"replica": second.url}).status_code == 201
            assert until(lambda: _up(servers.front, second.url))
            moved = servers.handed("moved")
            later = asked_again(servers, 200, 4)
            assert all(said.how == "done" and right(said, offline) for said in later), later
            assert servers.handed("moved") == moved + 4
            assert until(lambda: servers.prefill.at_rest() and second.at_rest(), SOON)


@pytest.mark.full
def test_one_of_two_decode_servers_dies(fault_model: Path, tmp_path: Path, offline: Offline) -> None:
    """Only what it had begun is lost; the other takes over, and the prefill server goes on for it."""
    learn(offline)
    with split(fault_model, tmp_path, decoders=2) as servers:
        answers = asyncio.run(kill_in_the_middle(servers, servers.decode))
        assert [said for said in answers if not right(said, offline)] == []
        lost = [said for said in answers if said.how != "done"]
        assert all(told(said) and said.home in (servers.decode.url, "") for said in lost), lost
        assert len(lost) < COUNT and not any(said.how == "status 503" for said in lost), lost
        assert servers.handed("no_replica") == 0, "the prefill server was taken for dead"
        later = asked_again(servers, 100, 4)
        assert all(said.how == "done" and right(said, offline) for said in later), later
        assert {said.home for said in later} == {servers.more[0].url}
        assert until(lambda: servers.prefill.at_rest() and servers.more[0].at_rest(), SOON)


@pytest.mark.full
def test_the_decode_server_dies_while_pages_are_pinned_for_it(fault_model: Path, tmp_path: Path) -> None:
    """The router releases them all; nobody waits for the leases' end."""
    with split(fault_model, tmp_path) as servers:
        answers = asyncio.run(kill_while_pinned(servers, servers.decode))
        assert all(told(said) and not said.tokens for said in answers), answers
        assert until(servers.prefill.at_rest, SOON), servers.prefill.stats()
        assert servers.handed("failed") == COUNT


@pytest.mark.full  # waits for the leases' end, 30 s
def test_the_router_dies_while_pages_are_pinned(fault_model: Path, tmp_path: Path, offline: Offline) -> None:
    """Nobody is left who would release them: the leases end by themselves, not before, and a new router goes on."""
    with split(fault_model, tmp_path) as servers:
        answers = asyncio.run(kill_while_pinned(servers, servers.front))
        assert [said.how for said in answers] == ["cut"] * COUNT
        servers.decode.process.send_signal(signal.SIGCONT)
        assert until(servers.decode.at_rest, SOON), servers.decode.stats()
        assert not servers.prefill.at_rest()
        assert until(servers.prefill.at_rest, LEASE_SECONDS + 5), servers.prefill.stats()
        urls = ("--prefill", servers.prefill.url, "--decode", servers.decode.url)
        with routing(tmp_path / "second", *urls) as front:
            again = Split(servers.prefill, servers.decode, front)
            later = asked_again(again, 100, 4)
            assert all(said.how == "done" and right(said, offline) for said in later), later
            assert again.handed("moved") == 4


@pytest.mark.full
def test_clients_leave_during_the_handoff(fault_model: Path, tmp_path: Path, offline: Offline) -> None:
    """Neither side keeps a page for them, wherever they were: computing, pinned, on the way, or just taken in."""
    chance = random.Random(0)

    async def leave(client: httpx.AsyncClient, number: int, seconds: float) -> None:
        task = asyncio.create_task(stream(client, number, TOKENS, prompt=long_prompt(number)))
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def crowd(servers: Split, first: int) -> None:
        async with servers.front.async_client() as client:
            await asyncio.gather(*(leave(client, first + i, chance.uniform(0.05, 1.5)) for i in range(COUNT)))

    with split(fault_model, tmp_path) as servers:
        for turn in range(3):
            asyncio.run(crowd(servers, 300 + turn * COUNT))
        assert servers.handed("cancelled") >= 3
        resting: dict[str, Callable[[], bool]] = {"prefill": servers.prefill.at_rest, "decode": servers.decode.at_rest}
        for name, rests in resting.items():
            assert until(rests, SOON), (name, servers.prefill.stats(), servers.decode.stats())
        later = asked_again(servers, 100, 4)
        assert all(said.how == "done" and right(said, offline) for said in later), later
        assert until(lambda: all(rests() for rests in resting.values()), SOON)


def _up(front: RealServer, url: str) -> bool:
    with front.client() as client:
        told = client.get("/admin/replicas").json()["replicas"]
    return any(replica["replica"] == url and replica["up"] for replica in told)
