"""Prefixes between two real servers: pinned, pulled, taken in, used; and every refusal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
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
from glm5sdk.serve.server import ServerSettings, create_app

PROMPT = "The quick brown fox jumps over the lazy dog, and then it sleeps until the morning comes again."
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def make_engine(seed: int = 0, **config: Any) -> AsyncEngine:
    torch.manual_seed(seed)
    text = make_text()
    model = Glm5ForCausalLM(preset("tiny", vocab_size=512, max_position_embeddings=4096)).eval()
    settings = {"page_size": 16, "num_pages": 32, "max_model_len": 256, **config}
    return AsyncEngine(Engine(model, text.tokenizer, EngineConfig(**settings)))


@contextlib.asynccontextmanager
async def servers(*engines: AsyncEngine, key: str | None = "a") -> AsyncIterator[list[httpx.AsyncClient]]:
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for engine in engines:
            stack.callback(engine.close)
            url = await stack.enter_async_context(
                serving(create_app(engine, ServerSettings(admin_key=key), make_text()))
            )
            client = httpx.AsyncClient(base_url=url, timeout=60, headers={"authorization": "Bearer a"})
            clients.append(await stack.enter_async_context(client))
        yield clients
    gc.collect()


async def run_prompt(client: httpx.AsyncClient) -> tuple[str, int]:
    answer = (await client.post("/v1/completions", json=BODY)).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def post(client: httpx.AsyncClient, name: str, **body: Any) -> tuple[int, Any]:
    answer = await client.post(f"/admin/kv/{name}", json=body)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("speculative", [0, 2])
@pytest.mark.parametrize("prefill", [True, False])
def test_a_moved_prefix_gives_the_same_tokens(prefill: bool, speculative: int) -> None:
    async def run() -> None:
        first, second, cold = (make_engine(speculative_tokens=speculative) for _ in range(3))
        async with servers(first, second, cold) as (a, b, c):
            expected, _ = await run_prompt(c)
            if not prefill:
                await run_prompt(a)
            status, told = await post(a, "export", path="/v1/completions", request=BODY, prefill=prefill)
            assert status == 200
            assert told["rows"] >= told["prompt_tokens"] - 1 - bool(speculative)
            pinned = first.info.num_pages - first.engine.stats().pages_free
            assert pinned == -(-told["rows"] // 16)
            source = str(a.base_url).rstrip("/")
            status, taken = await post(b, "import", source=source, lease_id=told["lease_id"])
            assert (status, taken["rows"]) == (200, told["rows"])
            for released in (True, False):  # twice is no error
                assert await post(a, "release", lease_id=told["lease_id"]) == (200, {"released": released})
            assert first.engine.stats().pages_free == first.info.num_pages
            got, cached = await run_prompt(b)
            assert got == expected
            assert cached >= told["rows"] - 1
            assert (await post(b, "import", source=source, lease_id=told["lease_id"]))[0] == 502

    asyncio.run(run())


def test_chats_are_understood_and_nothing_is_pinned_for_nothing() -> None:
    async def run() -> None:
        engine = make_engine()
        async with servers(engine) as (a,):
            chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            status, told = await post(a, "export", path="/v1/chat/completions", request=chat)
            assert (status, told["lease_id"], told["rows"]) == (200, None, 0)
            assert told["prompt_tokens"] > 5
            ids = (await a.post("/tokenize", json={"messages": chat["messages"]})).json()["tokens"]
            status, told = await post(a, "export", token_ids=ids, prefill=True, seconds=0.3)
            assert told["rows"] >= len(ids) - 1
            assert engine.engine.stats().pages_free < engine.info.num_pages
            assert await post(a, "renew", lease_id=told["lease_id"], seconds=0.2) == (200, {"renewed": True})
            async with asyncio.timeout(5):  # nobody releases it
                while engine.stats().pages_free < engine.info.num_pages:
                    await asyncio.sleep(0.02)
            assert await post(a, "renew", lease_id=told["lease_id"]) == (200, {"renewed": False})
            assert (await a.get(f"/admin/kv/pages/{told['lease_id']}")).status_code == 400

    asyncio.run(run())


def test_other_weights_and_other_geometry_are_refused() -> None:
    async def run() -> None:
        engines = [
            make_engine(),
            make_engine(weight_version="other"),
            make_engine(page_size=8),
        ]
        async with servers(*engines) as (a, *others):
            _, told = await post(a, "export", path="/v1/completions", request=BODY, prefill=True)
            for client, engine in zip(others, engines[1:], strict=True):
                before = engine.engine.stats().pages_cached
                status, error = await post(
                    client, "import", source=str(a.base_url).rstrip("/"), lease_id=told["lease_id"]
                )
                assert (status, "weights and geometry" in error["error"]["message"]) == (400, True), error
                assert engine.engine.stats().pages_cached == before

    asyncio.run(run())


def test_every_protocol_moves_the_prompt_that_it_runs() -> None:
    """What an export says of a request's prompt is what the request itself then counts."""
    turns = [{"role": "user", "content": "What is the weather in Paris today?"}]
    tool = {"type": "object", "properties": {"city": {"type": "string"}}}
    requests: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            "messages": turns, "max_tokens": 2,
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": tool}}],
        },
        "/v1/messages": {
            "messages": turns, "max_tokens": 2, "system": "Be short.",
            "tools": [{"name": "weather", "input_schema": tool}],
        },
        "/v1/responses": {"input": turns, "max_output_tokens": 2, "instructions": "Be short."},
    }  # fmt: skip

    async def run() -> None:
        async with servers(make_engine(max_model_len=2048, num_pages=256)) as (a,):
            for path, request in requests.items():
                status, told = await post(a, "export", path=path, request=request, prefill=True)
                assert status == 200, told
                usage = (await a.post(path, json=request)).json()["usage"]
                count = usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
                cached = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
                cached = cached.get("cached_tokens", usage.get("cache_read_input_tokens"))
                assert (count, cached) == (told["prompt_tokens"], count - 1), (path, usage)
            status, _ = await post(
                a, "export", path="/v1/responses", request={"input": "a", "previous_response_id": "r"}
            )
            assert status == 400

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("export", {"path": "/v1/embeddings", "request": {}}, 400),
        ("export", {"path": "/v1/completions", "request": {"prompt": ["a", "b"]}}, 400),
        ("export", {"path": "/v1/completions", "request": {"prompt": "a", "model": "no"}}, 404),
        ("export", {"path": "/v1/completions", "request": BODY, "prefill": True, "seconds": 1e9}, 400),
        ("import", {"source": "file:///etc/passwd", "lease_id": "a"}, 400),
        ("import", {"source": "http://127.0.0.1:1", "lease_id": "../../x"}, 400),
        ("import", {"source": "http://127.0.0.1:1", "lease_id": "a"}, 502),
        ("release", {"lease_id": 3}, 400),
        ("release", {"lease_id": "unknown"}, 200),
    ],
)
def test_refusals(name: str, body: dict[str, Any], status: int) -> None:
    async def run() -> None:
        engine = make_engine()
        async with servers(engine) as (a,):
            assert (await post(a, name, **body))[0] == status
            assert (await a.get("/admin/kv/pages/none")).status_code == 404
            assert engine.engine.stats().pages_free == engine.info.num_pages
            a.headers["authorization"] = "Bearer wrong"
            assert (await post(a, name, **body))[0] == 401

    asyncio.run(run())


def test_without_an_admin_key_nobody_moves_pages() -> None:
    async def run() -> None:
        async with servers(make_engine(), key=None) as (a,):
            for name in ("export", "import", "renew", "release"):
                assert (await post(a, name))[0] == 403

    asyncio.run(run())
