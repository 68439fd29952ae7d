"""Heads without end, and heads that never come, lose their connection; everything else is as before."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("httptools")
pytest.importorskip("uvicorn")

import uvicorn
from live_server import until

from glm5sdk.serve import bounded_heads


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server that says how long the body was."""
    monkeypatch.setattr(bounded_heads, "HEAD_SECONDS", 0.5)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
            await asyncio.sleep(0)
        answer = f"{scope['path'][:9]} {size}".encode()
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(answer))]}
        )
        await send({"type": "http.response.body", "body": answer})

    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off", ws="none",
                            http=bounded_heads.http_protocol())  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert until(lambda: server.started)
    yield server.servers[0].sockets[0].getsockname()
    server.should_exit = True
    thread.join(10)


def talk(address: tuple[str, int], *pieces: bytes) -> bytes:
    with socket.create_connection(address, timeout=5) as link:
        seen = b""
        with suppress(OSError):
            for piece in pieces:
                link.sendall(piece)
        with suppress(OSError):
            while got := link.recv(1 << 16):
                seen += got
        return seen


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nhost: x\r\nx-a: ", b"GET / HTTP/1.1\r\na"])
def test_a_head_without_end(address: tuple[str, int], start: bytes) -> None:
    sent = 0
    with socket.create_connection(address, timeout=5) as link, suppress(OSError):
        link.sendall(start)
        for _ in range(64):
            link.sendall(b"a" * (1 << 20))
            sent += 1
    assert sent < 32, "it read on"


def test_many_short_headers_are_a_long_head_too(address: tuple[str, int]) -> None:
    head = b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 300_000
    assert talk(address, head)[:12] in (b"HTTP/1.1 431", b"")


def test_a_head_that_takes_too_long(address: tuple[str, int]) -> None:
    """Nothing, a part, and a part of a second request: the connection is closed."""
    whole = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
    assert talk(address) == b""
    assert talk(address, b"GET /a HT") == b""
    assert talk(address, whole + whole[:-2]).count(b"/a 0") == 1


def test_large_bodies_and_pipelines_are_no_heads(address: tuple[str, int]) -> None:
    size = 3 << 20
    one = b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size
    last = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = talk(address, one + one + last[:20], last[20:])
    assert answer.count(b"/body %d" % size) == 2 and b"/last 0" in answer


def test_a_head_of_common_size_passes(address: tuple[str, int]) -> None:
    head = b"GET /a HTTP/1.1\r\nconnection: close\r\nx-a: " + b"a" * 60_000 + b"\r\n\r\n"
    assert b"/a 0" in talk(address, head)
