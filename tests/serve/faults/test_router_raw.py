"""The same bytes to a router in front of the server: nothing passes it that it should not pass."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from real_server import Offline, RealServer, body_of, post, routing, status_of, until
from test_raw_requests import SHAPES

HEADERS = [b"x-a: \xff\xfe", b"connection: x-a, close", b"te: trailers", b"accept-encoding: gzip, br",
           b"x-session-id: \xff",
           b"host: other", b"x-forwarded-for: 1,2", b"range: bytes=0-1"]  # fmt: skip
PATHS = [b"/v1/%00", b"/v1/%zz", b"/v1/models/%ff", b"/v1/models?x=%", b"/v1/" + b"a" * 70_000, b"/v1/[::1]",
         b"/v1/@evil",
         b"//v1/x", b"/v1/%2e%2e/admin/stats", b"/v1/..%2fadmin/stats", b"/v1/%252e%252e/admin/stats",
         b"http://a/v1/x", b"/v1/\\..\\admin", b"/versionary", b"/docs/../admin/stats"]  # fmt: skip


@pytest.fixture(scope="module")
def front(server: RealServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """`glm5 route` in front of the shared server."""
    log = tmp_path_factory.mktemp("route") / "log"
    with routing(log, "--replica", server.url) as running:
        yield running


@pytest.mark.full  # another process, and every shape waits for silence
def test_shapes_headers_and_paths(front: RealServer, server: RealServer, offline: Offline) -> None:
    for name, data in SHAPES.items():
        answer = front.raw(data, 1.0)
        assert status_of(answer) < 500 and b'"pages_total"' not in answer, (name, answer[:300])
    for header in HEADERS:
        data = post("/v1/completions", body_of(1, 2)).replace(b"\r\n", b"\r\n" + header + b"\r\n", 1)
        assert status_of(front.raw(data, 10.0)) == 200, header
    for path in PATHS:
        for method in (b"GET", b"POST", b"HEAD", b"OPTIONS", b"DELETE", b"PUT", b"TRACE", b"BREW"):
            rest = b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            answer = front.raw(method + b" " + path + rest, 5.0)
            assert 200 <= status_of(answer) < 500, (method, path[:80], answer[:300])
            assert b'"pages_total"' not in answer
    with front.client() as client:
        for depth in (60, 70, 300, *range(900, 1010, 10), 5000):
            for field in ("messages", "prompt", "input", "tools"):
                content = b'{"%s": ' % field.encode() + b"[" * depth + b"]" * depth + b"}"
                assert client.post("/v1/chat/completions", content=content).status_code == 400, (depth, field)
        for name in ("model", "user", "session_id", "metadata", "previous_response_id"):
            for value in ("\ud800", "\x00", {"user_id": "\ud800"}, {"user_id": 5}, 5, [1], "resp_" + "x" * 300):
                answer = client.post("/v1/responses", content=json.dumps({"input": "x", name: value}))
                assert answer.status_code in (200, 400, 404), (name, value, answer.text[:300])
        answer = client.post("/v1/completions", json=body_of(1, 4)).json()
        assert answer["choices"][0]["token_ids"] == offline.tokens(1, 4)
    assert until(server.at_rest)
