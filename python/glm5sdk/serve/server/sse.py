"""Server-sent events, and work that ends when the client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from glm5sdk.serve.server.errors import ApiError, as_api_error
from glm5sdk.serve.server.generation import PrimedDeltas

__all__ = ["DONE", "EventStream", "HungUpError", "event", "while_connected"]

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class HungUpError(Exception):
    """The client closed the connection; nobody reads an answer."""


def event(payload: Any, name: str | None = None) -> bytes:
    """One event; Anthropic and the Responses API also name it."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(payload) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it when the client hangs up. The request's body must have been read.

    Raises:
        HungUpError: the client is gone.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HungUpError
        return task.result()
    finally:
        await _ended(task)
        await _ended(watch)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(task: asyncio.Future[Any]) -> None:
    if task.done():
        if not task.cancelled():
            task.exception()  # seen; the caller raises what matters
        return
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task


class EventStream(Response):
    """Sends events as they come; closes their source when they end, fail or nobody listens any more.

    Args:
        events: encoded events. An exception in it becomes an error event.
        source: what they are made from; closed at the end too, since a generator that never ran closes nothing.
        on_error: how the protocol spells that event.
        headers: of the response.
        seconds: how long the stream may last.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: PrimedDeltas,
        on_error: Callable[[ApiError], bytes],
        headers: Mapping[str, str],
        seconds: float,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self._events = events
        self._source = source
        self._on_error = on_error
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the stream."""
        try:
            with suppress(HungUpError):
                await while_connected(receive, self._send(send))
        finally:
            await self._events.aclose()
            await self._source.aclose()

    async def _send(self, send: Callable[[Any], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with asyncio.timeout(self._seconds):
                async for chunk in self._events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:  # noqa: BLE001  whatever it is, the client is told
            rest = self._on_error(as_api_error(error))
            async with asyncio.timeout(10):  # a client that does not read must not hold us
                await send({"type": "http.response.body", "body": rest, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
