"""The router in front of fake replicas, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from fake_replica import FakeReplica, serving, words

from glm5sdk.serve.router import HealthRules, Router, RouterSettings, create_router

FAST = HealthRules(interval=0.2, timeout=1.0, first_recheck=0.05)


@contextlib.asynccontextmanager
async def routed(*replicas: FakeReplica, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Router, list[str]]]:
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(replica.app)) for replica in replicas]
        router = create_router(RouterSettings(replicas=tuple(urls), health=FAST, **settings))
        front = await stack.enter_async_context(serving(router))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=front, trust_env=False, timeout=20))
        yield client, router, urls


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def metric(text: str, name: str) -> float:
    return sum(float(v) for v in re.findall(rf"^{name}(?:\{{[^}}]*\}})? ([0-9.e+]+)$", text, re.MULTILINE))


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


def test_answers_pass_through_unchanged() -> None:
    async def run() -> None:
        replica = FakeReplica()
        async with routed(replica) as (client, _, urls):
            plain = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
            assert plain.status_code == 200
            assert plain.json()["text"] == "".join(words('"a"', 3))
            assert plain.headers["x-glm5-replica"] == urls[0]
            stream = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "stream": True})
            assert [json.loads(e)["text"] for e in events(stream.text)[:-1]] == words('"a"', 3)
            assert events(stream.text)[-1] == "[DONE]"
            assert "accept-encoding" not in replica.headers[0]
            bad = await client.post("/v1/completions", content=b"{not json")
            assert bad.status_code == 500  # the replica's own word, not the router's
            assert (await client.get("/nothing")).status_code == 404
            assert (await client.post("/v1/../admin/pause")).status_code in (400, 403)
            assert (await client.get("/v1/models")).json()["data"] == [{"id": "m", "object": "model"}]

    asyncio.run(run())


def test_events_arrive_while_the_replica_still_writes() -> None:
    async def run() -> None:
        replica = FakeReplica()
        async with routed(replica) as (client, _, _):
            body = {"prompt": "a", "max_tokens": 50, "delay": 0.1, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for piece in answer.aiter_text():
                    assert words('"a"', 1)[0] in piece
                    assert replica.running == 1
                    break

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_the_request_on_the_replica(stream: bool) -> None:
    async def run() -> None:
        replica = FakeReplica()
        async with routed(replica) as (client, router, _):
            body = {"prompt": "a", "max_tokens": 1000, "delay": 0.02, "stream": stream}
            with pytest.raises(httpx.ReadTimeout):
                await client.post(
                    "/v1/completions", json=body, timeout=0.5 if not stream else httpx.Timeout(5, read=0.01)
                )
            await until(lambda: replica.aborted == 1)
            assert replica.running == 0
            await until(lambda: all(r.in_flight == 0 for r in router.fleet))
            assert metric((await client.get("/metrics")).text, "glm5_router_client_aborts_total") == 1

    asyncio.run(run())


def test_sessions_stay_and_prompts_come_back() -> None:
    async def run() -> None:
        replicas = [FakeReplica(str(i)) for i in range(3)]
        async with routed(*replicas) as (client, _, _):
            for session in range(12):
                homes = set()
                for turn in range(3):
                    body = {"prompt": f"turn {turn}", "user": f"s{session}"}
                    homes.add((await client.post("/v1/completions", json=body)).json()["by"])
                assert len(homes) == 1
            assert all(replica.seen for replica in replicas)
            long = "x" * 4096
            homes = set()
            for tail in range(6):  # no session: the shared prefix alone decides
                body = {"prompt": long + str(tail)}
                homes.add((await client.post("/v1/completions", json=body)).json()["by"])
            assert len(homes) == 1
            assert metric((await client.get("/metrics")).text, "glm5_router_affinity_hits_total") >= 5

    asyncio.run(run())


def test_a_response_is_found_where_it_was_made() -> None:
    async def run() -> None:
        async with routed(*(FakeReplica(str(i)) for i in range(3))) as (client, router, _):
            for stream in (False, True):
                body = {"input": f"hello {stream}", "stream": stream}
                made = await client.post("/v1/responses", json=body)
                name = json.loads(events(made.text)[0])["id"] if stream else made.json()["id"]
                home = made.headers["x-glm5-replica"]
                for user in range(6):  # sessions that live elsewhere
                    body = {"input": "more", "previous_response_id": name, "user": f"u{user}"}
                    assert (await client.post("/v1/responses", json=body)).headers["x-glm5-replica"] == home
                router.fleet.need(home).draining = True
                assert (await client.get(f"/v1/responses/{name}")).headers["x-glm5-replica"] == home
                router.fleet.need(home).draining = False

    asyncio.run(run())


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_goes_to_another_replica(status: int) -> None:
    async def run() -> None:
        replicas = [FakeReplica(str(i)) for i in range(2)]
        async with routed(*replicas) as (client, _, _):
            home = (await client.post("/v1/completions", json={"prompt": "a"})).json()["by"]
            replicas[int(home)].mode = {"status": status}
            again = await client.post("/v1/completions", json={"prompt": "a"})
            assert again.status_code == 200
            assert again.json()["by"] != home
            text = (await client.get("/metrics")).text
            assert metric(text, "glm5_router_retries_total") == 1

    asyncio.run(run())


def test_all_full_says_when_to_come_back() -> None:
    async def run() -> None:
        replicas = [FakeReplica(str(i)) for i in range(2)]
        async with routed(*replicas) as (client, _, _):
            for replica in replicas:
                replica.mode = {"status": 429}
            answer = await client.post("/v1/messages", json={"messages": []})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
            assert answer.json()["error"]["type"] == "rate_limit_error"

    asyncio.run(run())


def test_own_limit_of_requests_in_flight() -> None:
    async def run() -> None:
        replicas = [FakeReplica(str(i)) for i in range(2)]
        async with routed(*replicas, max_in_flight=2) as (client, _, _):
            body = {"prompt": "a", "max_tokens": 40, "delay": 0.02}
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(6)))
            assert sorted(a.status_code for a in answers) == [200] * 4 + [429] * 2

    asyncio.run(run())


def test_retries_are_bounded() -> None:
    async def run() -> None:
        replicas = [FakeReplica(str(i)) for i in range(2)]
        async with routed(*replicas) as (client, router, _):
            for replica in replicas:
                replica.mode = {"status": 503}
            router._proxy._budget.per_second = 0.0
            for _ in range(60):
                assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 503
            text = (await client.get("/metrics")).text
            assert metric(text, "glm5_router_retries_total") <= 20 + 0.2 * 60
            assert metric(text, "glm5_router_retries_denied_total") >= 25

    asyncio.run(run())


@pytest.mark.parametrize("path", ["completions", "messages", "responses"])
def test_a_broken_stream_ends_in_an_error_event(path: str) -> None:
    async def run() -> None:
        replica = FakeReplica()
        async with routed(replica) as (client, _, _):
            replica.mode = {"break_at": 2}
            answer = await client.post(f"/v1/{path}", json={"prompt": "a", "stream": True})
            told = [json.loads(e) for e in events(answer.text)]
            assert [t.get("text") for t in told[:2]] == words('"a"', 4)[:2]
            assert "ha" not in [t.get("text") for t in told]
            assert "not whole" in told[2]["error"]["message"]
            assert len(told) == 3
            assert ("event: error\n" in answer.text) == (path != "completions")
            assert metric((await client.get("/metrics")).text, "glm5_router_broken_streams_total") == 1

    asyncio.run(run())


def test_keys_and_sizes() -> None:
    async def run() -> None:
        async with routed(FakeReplica(), api_keys=("k1", "k2"), max_body_bytes=1000) as (client, _, _):
            body = {"prompt": "a"}
            assert (await client.post("/v1/completions", json=body)).status_code == 401
            for headers in ({"authorization": "Bearer k1"}, {"x-api-key": "k2"}):
                assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
            headers = {"authorization": "Bearer k3"}
            assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 401
            assert (await client.get("/v1/models")).status_code == 401
            assert (await client.get("/health")).status_code == 200
            assert (await client.post("/admin/drain", json={}, headers=headers)).status_code == 403
            large = {"prompt": "a" * 1000}
            assert (await client.post("/v1/completions", json=large, headers={"x-api-key": "k1"})).status_code == 413

    asyncio.run(run())


def test_hostile_requests_are_answered() -> None:
    """Raw bytes on the wire: each gets an answer that is no 5xx of the router's making, and the router lives on."""
    deep = b"[" * 900 + b"]" * 900
    bodies = [
        b"\xff\xfe", b'{"user": "\\ud800"}', b'{"messages": ' + deep + b"}", b'{"prompt": 1e999, "max_tokens": 1}',
        b'{"prompt": [1, 2], "max_tokens": 1, "user": ' + b"9" * 5000 + b"}", b"NaN", b"null", b"",
    ]  # fmt: skip

    async def raw(port: int, head: bytes, body: bytes = b"", close: bool = False) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"\r\nhost: x\r\nconnection: close\r\n\r\n" + body)
        try:
            return (await reader.read()).partition(b"\r\n")[0]
        finally:
            writer.close()

    async def run() -> None:
        replica = FakeReplica()
        async with routed(replica, body_timeout=0.5) as (client, _, _):
            port = client.base_url.port
            assert port is not None
            for body in bodies:
                head = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d" % len(body)
                status = await raw(port, head, body)
                assert b" 200 " in status or b" 500 " in status, (body[:40], status)  # 500: the fake's own word
                assert len(replica.headers) < 100
            waiting = await raw(port, b"POST /v1/completions HTTP/1.1\r\ncontent-length: 10", b"{")
            assert b" 408 " in waiting
            for target in (
                b"http://127.0.0.1:1/v1/x",
                b"//127.0.0.1:1/v1/x",
                b"/v1/" + b"a" * 70_000,
                b"/v1/%2e%2e/admin",
            ):
                status = await raw(port, b"GET " + target + b" HTTP/1.1")
                assert b" 40" in status or b" 41" in status, (target[:40], status)
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200

    asyncio.run(run())


def test_the_fleet_is_administered() -> None:
    async def run() -> None:
        first, second = FakeReplica("0"), FakeReplica("1")
        async with routed(first, admin_key="a") as (client, router, urls), serving(second.app) as url:
            client.headers["authorization"] = "Bearer a"
            assert (await client.post("/admin/replicas", json={"replica": url})).status_code == 201
            assert (await client.post("/admin/replicas", json={"replica": url})).status_code == 400
            await until(lambda: router.fleet.need(url).health.up)
            assert {e["id"] for e in (await client.get("/v1/models")).json()["data"]} == {"0", "1"}
            for model in ("0", "1"):
                assert (await client.post("/v1/completions", json={"prompt": "a", "model": model})).json()[
                    "by"
                ] == model
            slow = asyncio.create_task(
                client.post("/v1/completions", json={"prompt": "slow", "model": "0", "max_tokens": 20, "delay": 0.03})
            )
            await until(lambda: first.running == 1)
            drained = await client.post("/admin/drain", json={"replica": urls[0], "wait": 5})
            assert (drained.json()["drained"], drained.json()["in_flight"]) == (True, 0)
            assert (await slow).json()["by"] == "0"
            for i in range(4):
                assert (await client.post("/v1/completions", json={"prompt": f"{i}"})).json()["by"] == "1"
            assert (await client.post("/admin/undrain", json={"replica": urls[0]})).json()["draining"] is False
            told = await client.post("/admin/pause", json={"now": 1})
            assert {a["body"]["done"] for a in told.json()["replicas"].values()} == {'{"now":1}'}
            long = {"prompt": "x" * 1000}
            await client.post("/v1/completions", json=long)
            first.model = "adapter"
            assert len(router.chooser.prefixes) > 0
            assert (await client.post("/admin/update_weights", json={})).status_code == 200
            assert len(router.chooser.prefixes) == 0
            await until(lambda: router.fleet.need(urls[0]).serves("adapter"))
            second.mode = {"admin": 500}
            assert (await client.post("/admin/resume")).status_code == 502
            assert (await client.request("DELETE", "/admin/replicas", json={"replica": url})).status_code == 200
            assert len((await client.get("/admin/replicas")).json()["replicas"]) == 1
            assert (await client.post("/admin/drain", json={"replica": 3})).status_code == 400

    asyncio.run(run())


def test_ill_replicas_are_left_out_and_come_back() -> None:
    async def run() -> None:
        replicas = [FakeReplica(str(i)) for i in range(2)]
        async with routed(*replicas) as (client, router, urls):
            replicas[0].mode = {"health": 500}
            await until(lambda: not router.fleet.need(urls[0]).health.up)
            for i in range(6):
                assert (await client.post("/v1/completions", json={"prompt": f"{i}"})).json()["by"] == "1"
            replicas[1].mode = {"health": 500}
            await until(lambda: not router.fleet.need(urls[1]).health.up)
            answer = await client.post("/v1/completions", json={"prompt": "a"})
            assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
            assert (await client.get("/health")).status_code == 503
            replicas[0].mode = replicas[1].mode = {}
            await until(lambda: all(r.health.up for r in router.fleet))
            assert (await client.get("/health")).status_code == 200

    asyncio.run(run())
