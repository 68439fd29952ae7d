"""From a replica's answer to the client's connection: streams event by event, other answers whole."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from glm5sdk.serve.router.errors import RouteError, error_event
from glm5sdk.serve.router.events import WholeEvents

__all__ = ["HOP_HEADERS", "LARGEST_ANSWER", "BrokenStream", "relay", "send_whole"]

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

LARGEST_ANSWER = 256 * 2**20
HOP_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
     b"transfer-encoding", b"upgrade", b"content-length")
)  # fmt: skip
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp[^"\\]{1,128})"')


class BrokenStream(Exception):
    """The stream broke after its start; the client was told so by an error event."""


async def relay(
    answer: Any, path: str, send: Send, extra: Iterable[tuple[bytes, bytes]], made: Callable[[str], None]
) -> None:
    """Pass on one answer.

    Args:
        answer: an open httpx response.
        path: the route, for the shape of an error event.
        send: of ASGI.
        extra: headers to add.
        made: is told the id of a response that the replica may keep.

    Raises:
        RouteError: the answer broke before anything was sent.
        BrokenStream: it broke afterwards.
    """
    import httpx

    drop = HOP_HEADERS | {b"date", b"server"}  # the server under the router writes its own
    headers = [(n.lower(), v) for n, v in answer.headers.raw if n.lower() not in drop] + list(extra)
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        await _stream(answer, path, send, headers, made)
        return
    body = bytearray()
    try:
        async for piece in answer.aiter_raw():
            body += piece
            if len(body) > LARGEST_ANSWER:
                raise RouteError(502, f"the replica's answer is over {LARGEST_ANSWER} bytes", "replica_error")
    except httpx.TransportError as error:
        raise RouteError(502, f"the replica was lost before its answer was whole: {_words(error)}",
                         "replica_lost") from error  # fmt: skip
    if path.startswith("/v1/responses") and (found := _RESPONSE_ID.search(body)):
        made(found[1].decode("utf-8", "replace"))
    length = answer.headers.get("content-length", "0") if answer.request.method == "HEAD" else str(len(body))
    await send_whole(send, answer.status_code, [*headers, (b"content-length", length.encode())], bytes(body))


async def send_whole(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    """An answer in one piece."""
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _stream(
    answer: Any, path: str, send: Send, headers: list[tuple[bytes, bytes]], made: Callable[[str], None]
) -> None:
    import httpx

    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
    events, look = WholeEvents(), path.startswith("/v1/responses")
    try:
        async for piece in answer.aiter_raw():
            if whole := events.feed(piece):
                if look and (found := _RESPONSE_ID.search(whole)):
                    made(found[1].decode("utf-8", "replace"))
                    look = False
                await send({"type": "http.response.body", "body": whole, "more_body": True})
        if events.rest:
            raise ValueError("router: the stream ended within an event")
    except (httpx.TransportError, ValueError) as error:
        message = f"the replica was lost while it answered, the text above is not whole: {_words(error)}"
        await send({"type": "http.response.body", "body": error_event(path, message, "replica_lost")})
        raise BrokenStream(message) from error
    await send({"type": "http.response.body", "body": b""})


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
