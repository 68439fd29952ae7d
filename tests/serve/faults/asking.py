"""Asking a server for completions, and what became of each."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
from real_server import body_of


@dataclass
class Said:
    """One answer.

    Attributes:
        number, asked: of `body_of`.
        how: "done", "told" (an error event ended the stream), "cut" (the connection broke), "silent" (the stream ended
            without a word) or "status N".
        tokens: that came.
        home: the replica, behind a router.
        version: of the weights.
        headers: of the answer.
        error: of the event or body.
    """

    number: int
    asked: int
    how: str = "silent"
    tokens: list[int] = field(default_factory=list)
    home: str = ""
    version: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)


async def ask(client: httpx.AsyncClient, number: int, tokens: int = 12, **more: Any) -> Said:
    """A whole answer."""
    said = Said(number, tokens)
    try:
        answer = await client.post("/v1/completions", json=body_of(number, tokens, **more))
    except httpx.TransportError:
        said.how = "cut"
        return said
    said.headers, said.home = dict(answer.headers), answer.headers.get("x-glm5-replica", "")
    if answer.status_code != 200:
        said.how, said.error = f"status {answer.status_code}", answer.json()["error"]
        return said
    choice = answer.json()["choices"][0]
    said.how, said.tokens, said.version = "done", choice["token_ids"], choice["weight_version"]
    return said


async def stream(
    client: httpx.AsyncClient, number: int, tokens: int = 12, most: int | None = None, seen: list[int] | None = None,
    **more: Any,
) -> Said:  # fmt: skip
    """A streamed answer; hangs up after `most` events, and appends its number to `seen` at the first."""
    said, events = Said(number, tokens), 0
    body = body_of(number, tokens, stream=True, **more)
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            said.headers, said.home = dict(answer.headers), answer.headers.get("x-glm5-replica", "")
            if answer.status_code != 200:
                said.how, said.error = f"status {answer.status_code}", json.loads(await answer.aread())["error"]
                return said
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    said.how = "done"
                elif line:
                    payload = json.loads(line.removeprefix("data: "))
                    if "error" in payload:
                        said.how, said.error = "told", payload["error"]
                        return said
                    for choice in payload["choices"]:
                        said.tokens += choice["token_ids"]
                    said.version = payload.get("weight_version") or said.version
                    events += 1
                    if events == 1 and seen is not None:
                        seen.append(number)
                    if most is not None and events >= most:
                        said.how = "left"
                        return said
    except httpx.TransportError:
        said.how = "cut"
    return said
