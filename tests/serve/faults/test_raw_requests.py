"""Bytes that no client library would send: never a 5xx, never a hang, and the server goes on."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from real_server import Offline, RealServer, body_of, post, status_of, until

GOOD = {"prompt": "hi", "max_tokens": 2}
DEEP = b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
HOLES = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture(autouse=True)
def healthy(server: RealServer, offline: Offline) -> Iterator[None]:
    """After each test the server answers rightly and holds nothing."""
    yield
    with server.client() as client:
        answer = client.post("/v1/completions", json=body_of(1, 4))
        assert answer.json()["choices"][0]["token_ids"] == offline.tokens(1, 4)
    assert until(server.at_rest), server.stats()


SHAPES = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "a bare line": b"\r\n\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "another version": b"GET /health HTTP/9.9\r\nhost: x\r\n\r\n",
    "two lengths": HOLES + b"content-length: 2\r\ncontent-length: 40\r\n\r\n{}",
    "length and chunks": HOLES + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    b"GET /admin/stats HTTP/1.1\r\nhost: x\r\n\r\n",
    "chunks, spelled oddly": HOLES + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunks after a tab": HOLES + b"transfer-encoding:\tchunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "a negative length": HOLES + b"content-length: -5\r\n\r\n{}",
    "a signed length": HOLES + b"content-length: +2\r\n\r\n{}",
    "a length in words": HOLES + b"content-length: two\r\n\r\n{}",
    "a length of 5000 digits": HOLES + b"content-length: " + b"9" * 5000 + b"\r\n\r\n{}",
    "a chunk of nonsense": HOLES + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a chunk of 2^70": HOLES + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffffff\r\n{}",
    "a folded header": HOLES + b"x-a: 1\r\n 2\r\ncontent-length: 2\r\n\r\n{}",
    "a space before the colon": HOLES + b"content-length : 2\r\n\r\n{}",
    "a NUL in a header": HOLES + b"x-a: \x00\r\ncontent-length: 2\r\n\r\n{}",
    "a header of a megabyte": HOLES + b"x-a: " + b"a" * (1 << 20) + b"\r\n\r\n",
    "headers without end": HOLES + b"x-a: 1\r\n" * 100_000,
    "a path of a megabyte": b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "a path with NUL": b"GET /v1/models/%00%ff HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "a path upwards": b"GET /v1/models/../../admin/stats HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "another's address": b"GET http://example.invalid/health HTTP/1.1\r\nhost: y\r\nconnection: close\r\n\r\n",
    "a tunnel": b"CONNECT example.invalid:80 HTTP/1.1\r\nhost: y\r\n\r\n",
    "an upgrade": b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    "HTTP/2 from the start": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an expectation": post("/v1/completions", GOOD, "expect: 100-continue"),
    "an odd expectation": post("/v1/completions", GOOD, "expect: a-miracle"),
    "a compressed body": post("/v1/completions", b"\x1f\x8b\x08\x00" + b"x" * 40, "content-encoding: gzip"),
    "another charset": post("/v1/completions", GOOD, "content-type: application/json; charset=utf-16"),
    "a form": post("/v1/completions", b"--x\r\n\r\n", "content-type: multipart/form-data; boundary=x"),
    "depth": post("/v1/completions", DEEP),
    "depth in a stream": HOLES + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(DEEP) + DEEP + b"\r\n0\r\n\r\n",
    "half a request": HOLES + b"content-length: 100\r\n\r\n{",
    "a key of odd bytes": post("/admin/pause", b"{}", "authorization: Bearer \xff\xfe"),
    "a key of a kilobyte": post("/admin/pause", b"{}", "authorization: Bearer " + "k" * 1000),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(server: RealServer, shape: str) -> None:
    begin = time.monotonic()
    answer = server.raw(SHAPES[shape], seconds=1.0)
    assert time.monotonic() - begin < 4.0
    assert status_of(answer) < 500, answer[:300]
    assert b'"pages_total"' not in answer, "no route of the administrator was reached"
    if shape in ("depth", "depth in a stream"):
        assert status_of(answer) == 400 and b"nested" in answer


def test_smuggled_requests_are_not_answered(server: RealServer) -> None:
    """Length and chunks together: one message or a refusal, never a second request out of the body."""
    for shape in ("length and chunks", "chunks after a tab", "two lengths"):
        assert server.raw(SHAPES[shape]).count(b"HTTP/1.1 ") <= 1, shape


def test_pipelined_requests_are_answered_in_order(server: RealServer, offline: Offline) -> None:
    def kept(number: int) -> bytes:
        return post("/v1/completions", body_of(number, 3)).replace(b"connection: close\r\n", b"")

    with socket.create_connection(server.address, timeout=20) as link:
        link.sendall(b"".join(kept(i) for i in range(6)) + post("/v1/completions", body_of(6, 3)))
        seen = b""
        while piece := link.recv(65536):
            seen += piece
    bodies = [json.loads(part[part.index(b"{") :]) for part in seen.split(b"HTTP/1.1 200 OK")[1:]]
    assert [body["choices"][0]["token_ids"] for body in bodies] == [offline.tokens(i, 3) for i in range(7)]


def test_bodies_beyond_the_limit(server: RealServer) -> None:
    """A declared one is refused unread; one in chunks where it passes the limit; the memory stays."""
    before = server.resident_bytes()
    assert status_of(server.raw(HOLES + b"content-length: 99999999999\r\n\r\n{", 5.0)) == 413
    assert status_of(server.raw(HOLES + b"content-length: 33554433\r\n\r\n{", 5.0)) == 413
    piece = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    for _ in range(2):
        with socket.create_connection(server.address, timeout=20) as link:
            link.sendall(HOLES + b"transfer-encoding: chunked\r\n\r\n")
            sent, answer = 0, b""
            with suppress(OSError):
                for _ in range(200):
                    link.sendall(piece)
                    sent += 1
            with suppress(OSError):
                answer = link.recv(65536)
            assert sent < 60, "the server read on"
            assert status_of(answer) in (0, 413)
    assert server.resident_bytes() - before < 160 << 20


def test_many_slow_clients_hold_nobody_up(server: RealServer, offline: Offline) -> None:
    """200 connections that send a byte now and then; others are served meanwhile as if they were not there."""
    slow = [socket.create_connection(server.address, timeout=5) for _ in range(200)]
    try:
        for number, link in enumerate(slow):
            link.sendall(HOLES[: 1 + number % len(HOLES)])
        for link in slow[::2]:
            link.sendall(b"x")
        begin = time.monotonic()
        with server.client() as client:
            answer = client.post("/v1/completions", json=body_of(2, 4)).json()
        assert answer["choices"][0]["token_ids"] == offline.tokens(2, 4)
        assert time.monotonic() - begin < 5.0
    finally:
        for link in slow:
            link.close()
