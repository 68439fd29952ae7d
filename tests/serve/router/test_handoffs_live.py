"""Migration and the split of prefill and decode over HTTP, with real engines behind real servers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import torch
from fake_replica import serving
from server_fakes import make_text

from glm5sdk.models.glm5 import Glm5ForCausalLM, preset
from glm5sdk.serve.async_engine import AsyncEngine
from glm5sdk.serve.config import EngineConfig
from glm5sdk.serve.engine import Engine
from glm5sdk.serve.router import Affinity, HealthRules, Router, RouterSettings, create_router
from glm5sdk.serve.server import ServerSettings, create_app

FAST = HealthRules(interval=0.2, timeout=2.0, first_recheck=0.05)
PROMPT = "A session that grows and grows, from turn to turn, and is read again each time. "


def make_engine(**config: Any) -> AsyncEngine:
    torch.manual_seed(0)
    text = make_text()
    model = Glm5ForCausalLM(preset("tiny", vocab_size=512)).eval()
    settings = {"page_size": 16, "num_pages": 64, "max_model_len": 512, **config}
    return AsyncEngine(Engine(model, text.tokenizer, EngineConfig(**settings)))


@contextlib.asynccontextmanager
async def fleet(
    *engines: AsyncEngine, prefill: int = 0, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Router, list[str]]]:
    """The first `prefill` engines compute prompts, the others answer."""
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for engine in engines:
            stack.callback(engine.close)
            app = create_app(engine, ServerSettings(admin_key="a"), make_text())
            urls.append(await stack.enter_async_context(serving(app)))
        router = create_router(
            RouterSettings(
                replicas=tuple(urls[prefill:]), prefill=tuple(urls[:prefill]), admin_key="a", health=FAST,
                affinity=Affinity(chunk=32), **settings,
            )
        )  # fmt: skip
        front = await stack.enter_async_context(serving(router))
        yield await stack.enter_async_context(httpx.AsyncClient(base_url=front, timeout=60)), router, urls


async def ask(client: httpx.AsyncClient, turns: int, **more: Any) -> dict[str, Any]:
    prompt = "".join(f"{PROMPT}{i} " for i in range(turns))
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return {**answer.json(), "home": answer.headers["x-glm5-replica"]}


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def handed(client: httpx.AsyncClient, kind: str) -> dict[str, float]:
    text = (await client.get("/metrics")).text
    found = re.findall(rf'glm5_router_handoffs_total{{kind="{kind}",outcome="(\w+)"}} ([0-9.]+)', text)
    return {outcome: float(count) for outcome, count in found}


async def nothing_pinned(*engines: AsyncEngine) -> None:
    async with asyncio.timeout(5):
        while any(engine.stats().pages_free < engine.info.num_pages for engine in engines):
            await asyncio.sleep(0.02)


def test_a_session_brings_its_prefix_along() -> None:
    async def run() -> None:
        engines = [make_engine() for _ in range(3)]
        async with fleet(*engines[:2], migrate=True) as (client, router, _):
            first = await ask(client, 3, user="s")
            router.fleet.need(first["home"]).draining = True
            second = await ask(client, 4, user="s")
            assert second["home"] != first["home"]
            assert cached(second) >= 3 * len(PROMPT) - 16
            assert await handed(client, "migrate") == {"moved": 1.0}
            owner = router.chooser.owners.get("user:s")
            assert owner is not None and owner.replica == second["home"]
            router.fleet.need(first["home"]).draining = False
            assert (await ask(client, 5, user="s"))["home"] == second["home"]
            await nothing_pinned(*engines[:2])
        async with fleet(engines[2]) as (client, _, _):
            assert (await ask(client, 4))["choices"][0]["text"] == second["choices"][0]["text"]

    asyncio.run(run())


def test_prompts_are_computed_apart_from_answers() -> None:
    async def run() -> None:
        engines = [make_engine() for _ in range(3)]
        async with fleet(*engines[:2], prefill=1) as (client, _, urls):
            answer = await ask(client, 3)
            assert answer["home"] == urls[1]
            assert cached(answer) >= answer["usage"]["prompt_tokens"] - 2
            assert engines[0].stats().prompt_tokens >= answer["usage"]["prompt_tokens"]
            assert await handed(client, "prefill") == {"moved": 1.0}
            await ask(client, 3)  # the decoder has it by now
            assert await handed(client, "prefill") == {"moved": 1.0}
            await nothing_pinned(*engines[:2])
        async with fleet(engines[2]) as (client, _, _):
            assert (await ask(client, 3))["choices"][0]["text"] == answer["choices"][0]["text"]

    asyncio.run(run())


@pytest.mark.parametrize("how", ["other weights", "gone", "slow"])
def test_a_handoff_that_fails_is_seen_and_costs_no_answer(how: str) -> None:
    async def run() -> None:
        engines = [
            make_engine(weight_version="other" if how == "other weights" else "w"),
            make_engine(weight_version="w"),
        ]
        timeout = 0.2 if how == "slow" else 60.0
        async with fleet(*engines, prefill=1, prefill_timeout=timeout, lease_ttl=2.0) as (client, _, urls):
            if how == "slow":
                await engines[0].control("pause", {})
            if how == "gone":
                engines[0].close()
            answer = await ask(client, 3)
            assert (answer["home"], cached(answer)) == (urls[1], 0)
            assert await handed(client, "prefill") == {"timeout" if how == "slow" else "failed": 1.0}
            if how == "slow":
                await engines[0].control("resume", {})
            if how != "gone":
                await nothing_pinned(engines[0])
            await nothing_pinned(engines[1])

    asyncio.run(run())


def test_a_source_that_is_taken_for_dead_is_not_waited_for() -> None:
    async def run() -> None:
        engines = [make_engine() for _ in range(2)]
        async with fleet(*engines, prefill=1, prefill_timeout=60.0) as (client, router, urls):
            await engines[0].control("pause", {})
            source = router.prefill_fleet.need(urls[0])
            asked = asyncio.create_task(ask(client, 3))
            async with asyncio.timeout(5):
                while not source.in_flight:
                    await asyncio.sleep(0.01)
            source.health.eject("no answer")
            async with asyncio.timeout(10):
                answer = await asked
            assert (answer["home"], cached(answer)) == (urls[1], 0)
            assert await handed(client, "prefill") == {"failed": 1.0}
            await engines[0].control("resume", {})
            await nothing_pinned(*engines)

    asyncio.run(run())


def test_a_replica_that_cannot_take_a_prefix_is_not_the_fault_of_the_one_that_has_it() -> None:
    async def run() -> None:
        engine = make_engine()
        with socket.create_server(("127.0.0.1", 0)) as closed:
            dead = f"http://127.0.0.1:{closed.getsockname()[1]}"
        async with fleet(engine, prefill=1) as (client, router, urls):
            router.fleet.add(dead).health.passed()
            answer = await client.post("/v1/completions", json={"prompt": PROMPT * 3, "max_tokens": 2})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
            assert await handed(client, "prefill") == {"failed": 1.0}
            health = router.prefill_fleet.need(urls[0]).health
            assert (health.up, health.ejections) == (True, 0)
            await nothing_pinned(engine)

    asyncio.run(run())


def test_a_client_that_leaves_ends_the_prompt_too() -> None:
    async def run() -> None:
        engines = [make_engine() for _ in range(2)]
        async with fleet(*engines, prefill=1) as (client, router, _):
            await engines[0].control("pause", {})
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/completions", json={"prompt": PROMPT * 3}, timeout=0.5)
            async with asyncio.timeout(5):
                while engines[0].stats().waiting or any(r.in_flight for r in router.prefill_fleet):
                    await asyncio.sleep(0.02)
            await engines[0].control("resume", {})
            await nothing_pinned(*engines)
            assert engines[1].stats().prompt_tokens == 0
            assert await handed(client, "prefill") == {"cancelled": 1.0}

    asyncio.run(run())
