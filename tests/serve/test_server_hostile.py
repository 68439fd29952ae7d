"""Bodies, headers and numbers that nobody should send: a sentence and a status, never a 500."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from server_fakes import Bench

POSTS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
POSTS += ["/tokenize", "/detokenize", "/abort"]
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/abort": {"request_id": "x"},
}
BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "no object": b"[1]",
    "a number": b"5",
    "bad UTF-8": b'{"prompt": "\xff\xfe"}',
    "bad UTF-8 in a name": b'{"\xff": 1}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "a lone surrogate": b'{"prompt": "\\ud800 x", "input": "\\udfff", "messages": "\\ud800", "request_id": "\\udc00"}',
    "a surrogate in a name": b'{"\\ud83d": 1}',
    "NaN": b'{"temperature": NaN}',
    "Infinity": b'{"temperature": -Infinity}',
    "an endless number": b'{"temperature": 1e999}',
    "a huge int": b'{"n": ' + b"9" * 5000 + b"}",
    "deep lists": b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"x": ' + b'{"a":' * 500 + b"1" + b"}" * 501,
    "deep, not closed": b"[" * 10_000,
    "trailing text": b"{} {}",
    "a comment": b"{/* */}",
    "NUL": b"\x00",
}


def refused(answer: Any, path: str, statuses: tuple[int, ...] = (400,)) -> None:
    assert answer.status_code in statuses, (path, answer.status_code, answer.text[:300])
    body = answer.json()
    error = body["error"]
    assert error["message"] and error["type"] and len(answer.content) < 4000
    assert set(error) == ({"type", "message"} if path == "/v1/messages" else {"message", "type", "param", "code"})


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_are_none(path: str) -> None:
    bench = Bench()
    for body in BODIES.values():
        refused(bench.post(path, body), path)
    assert not bench.engine.requests


@pytest.mark.parametrize("path", POSTS)
def test_wrong_types_everywhere(path: str) -> None:
    """Each field of each schema in turn gets a value of every other kind."""
    bench = Bench()
    document = bench.get("/openapi.json").json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]["properties"]
    assert set(BASE[path]) <= set(fields)
    wrong = [True, -1, 2**70, 1.5, "x", "", [], [[]], ["x"], {}, {"type": "x"}, {"x": [None]}, [None], [{"type": {}}]]
    for name in fields:
        for value in wrong:
            answer = bench.post(path, {**BASE[path], name: value, "stream": False} if name != "stream" else
                                {**BASE[path], name: value})  # fmt: skip
            assert answer.status_code in (200, 400, 404), (name, value, answer.status_code, answer.text[:300])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.sampled_from(["user", "assistant", "tool", "text", "function", "input_text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "name", "arguments", "tool_calls", "function", "input"])
        | st.text(max_size=5), inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(POSTS[:4]), st.data())
def test_random_conversations(path: str, data: st.DataObject) -> None:
    bench = _bench()
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    body = {**BASE[path], field: data.draw(JSON | st.lists(JSON, max_size=3))}
    body["tools"] = data.draw(st.none() | st.lists(JSON, max_size=2))
    answer = bench.post(path, json.dumps(body).encode("utf-8", "surrogatepass"))
    assert answer.status_code in (200, 400), (body, answer.text)


_kept: list[Bench] = []


def _bench() -> Bench:
    if not _kept:
        _kept.append(Bench())
    return _kept[0]


def test_bodies_over_the_limit_are_refused_before_they_are_read() -> None:
    bench = Bench(max_body_bytes=1000)
    refused(bench.post("/v1/completions", {"prompt": "x" * 2000}), "", (413,))
    assert bench.post("/v1/completions", {"prompt": "x" * 900}).status_code == 200
    refused(bench.post("/v1/completions", b"{}", **{"content-length": "9" * 30}), "", (413,))


def test_bodies_without_a_length_are_cut_off() -> None:
    bench = Bench(max_body_bytes=1000)
    sent = 0

    async def call() -> Any:
        async def chunks() -> Any:
            nonlocal sent
            for _ in range(100):
                sent += 100
                yield b" " * 100

        async with bench.client() as client:
            return await client.post("/v1/completions", content=chunks())

    import asyncio

    refused(asyncio.run(call()), "", (413,))


def test_slow_bodies_end() -> None:
    import asyncio

    bench = Bench(body_timeout=0.05)

    async def call() -> Any:
        async def chunks() -> Any:
            yield b"{"
            await asyncio.sleep(5)
            yield b"}"

        async with bench.client() as client:
            return await client.post("/v1/completions", content=chunks())

    refused(asyncio.run(call()), "", (408,))


def test_unknown_fields_and_null_are_ignored() -> None:
    bench = Bench("</think>x")
    answer = bench.chat(service_tier="auto", nonsense={"a": 1}, temperature=None, stop=None, tools=None)
    assert answer.status_code == 200


@pytest.mark.parametrize("part", ["image_url", "input_audio", "video_url", "file"])
def test_media_are_refused_in_words(part: str) -> None:
    message = {"role": "user", "content": [{"type": part, part: {}}]}
    answer = Bench().post("/v1/chat/completions", {"messages": [message]})
    refused(answer, "")
    assert answer.json()["error"]["code"] == "unsupported_content" and "text only" in answer.text


def test_unknown_paths_and_methods() -> None:
    bench = Bench()
    refused(bench.get("/nope"), "", (404,))
    refused(bench.get("/v1/chat/completions"), "", (405,))
    refused(bench.post("/v1/models", {}), "", (405,))
    assert bench.get("/v1/messages").json()["type"] == "error"


def test_unknown_models() -> None:
    bench = Bench("</think>x")
    answer = bench.chat(model="other")
    refused(answer, "", (404,))
    assert answer.json()["error"]["code"] == "model_not_found"
    assert bench.get("/v1/models/other").status_code == 404
    assert bench.get("/v1/models/tiny").json()["max_model_len"] == 4096


def test_a_prompt_that_is_too_long_says_the_limit() -> None:
    bench = Bench()
    answer = bench.chat("x" * 5000)
    assert answer.json()["error"]["code"] == "context_length_exceeded" and "4096" in answer.text
    assert bench.post("/v1/completions", {"prompt": "x", "max_tokens": 4096}).status_code == 400
    assert bench.post("/v1/completions", {"prompt": "x", "max_tokens": 4095}).status_code == 200


def test_template_variables_cannot_replace_the_request() -> None:
    bench = Bench()
    for name in ("messages", "tools", "add_generation_prompt", "self"):
        refused(bench.chat(chat_template_kwargs={name: []}), "")


def test_an_engine_that_breaks_is_a_500_without_details() -> None:
    bench = Bench()
    bench.engine.fail = RuntimeError("secret")
    answer = bench.chat()
    refused(answer, "", (500,))
    assert "secret" not in answer.text
    bench.engine.fail = None
    bench.engine.broken = "out of memory"
    answer = bench.chat()
    refused(answer, "", (500,))
    assert "out of memory" in answer.text
