"""Real clients see a broken stream as an error, never as a short answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_replica import FakeReplica, serving, words

from glm5sdk.serve.router import RouterSettings, create_router

MESSAGES = [{"role": "user", "content": "a"}]


@contextlib.asynccontextmanager
async def front() -> AsyncIterator[tuple[str, FakeReplica]]:
    replica = FakeReplica()
    async with serving(replica.app) as url, serving(create_router(RouterSettings(replicas=(url,)))) as door:
        yield door, replica


@pytest.mark.parametrize("route", ["completions", "chat", "responses"])
def test_openai(route: str) -> None:
    openai = pytest.importorskip("openai")

    async def read(client: Any) -> list[Any]:
        if route == "completions":
            stream = await client.completions.create(model="m", prompt="a", stream=True, max_tokens=4)
        elif route == "chat":
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        else:
            stream = await client.responses.create(model="m", input="a", stream=True)
        return [chunk async for chunk in stream]

    async def run() -> None:
        async with front() as (url, replica), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as c:
            if route == "completions":
                assert [chunk.text for chunk in await read(c)] == words('"a"', 4)
            replica.mode = {"break_at": 2}
            with pytest.raises(openai.APIError, match="not whole"):
                await read(c)

    asyncio.run(run())


def test_anthropic() -> None:
    anthropic = pytest.importorskip("anthropic")

    async def read(client: Any) -> list[Any]:
        stream = await client.messages.create(model="m", max_tokens=4, messages=MESSAGES, stream=True)
        return [event async for event in stream]

    async def run() -> None:
        async with front() as (url, replica), anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as c:
            replica.mode = {"break_at": 2}
            with pytest.raises(anthropic.APIError, match="not whole"):
                await read(c)

    asyncio.run(run())
