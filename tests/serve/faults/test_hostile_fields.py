"""Fields that mean harm, against a server process: an answer of words within seconds, and no memory lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_server import Offline, RealServer, body_of, until

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": CHAT,
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}
GENERATE = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
LONGEST = 8.0  # seconds; a grammar may take one, and the machine may be busy


@pytest.fixture(scope="module")
def calls(server: RealServer, offline: Offline) -> Iterator[httpx.Client]:
    """A client; in the end the server is healthy and holds nothing."""
    with server.client() as client:
        client.post("/v1/completions", json=body_of(1, 4))
        yield client
        assert client.post("/v1/completions", json=body_of(1, 4)).json()["choices"][0]["token_ids"] == offline.tokens(
            1, 4
        )
        assert until(server.at_rest), server.stats()


def send(calls: httpx.Client, path: str, body: Any) -> httpx.Response:
    """Post, and check what holds of every answer."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "surrogatepass")
    begin = time.monotonic()
    answer = calls.post(path, content=raw)
    assert time.monotonic() - begin < LONGEST, (path, raw[:300])
    assert answer.status_code < 500, (path, raw[:300], answer.text[:500])
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"] and len(answer.content) < 5000, answer.text[:300]
    return answer


def nested(kind: str, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema} if kind == "array" else {
            "type": "object", "properties": {"a": schema}, "required": ["a"]}  # fmt: skip
    return schema


SCHEMAS: dict[str, Any] = {
    "itself": {"$ref": "#"},
    "itself in a ring": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "a tree without leaves": {"$defs": {"a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}},
                                              "required": ["x"]}}, "$ref": "#/$defs/a"},
    "nowhere": {"$ref": "#/$defs/none"},
    "a file": {"$ref": "file:///etc/passwd"},
    "the net": {"$ref": "http://example.invalid/schema.json"},
    "deep arrays": nested("array", 20),
    "deep objects": nested("object", 20),
    "deeper than bodies may be": nested("array", 100),
    "many of many": {"anyOf": [{"anyOf": [{"const": f"{i}-{j}"} for j in range(40)]} for i in range(40)]},
    "all of many": {"allOf": [{"type": "object", "properties": {f"p{i}": {"type": "string"}}} for i in range(200)]},
    "ten to the nine items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "ten to the nine characters": {"type": "string", "minLength": 10**9},
    "a negative length": {"type": "string", "minLength": -1},
    "empty between bounds": {"type": "integer", "minimum": 5, "maximum": 1},
    "nothing": {"not": {}},
    "false": {"type": "object", "properties": {"a": False}, "required": ["a"]},
    "an unknown type": {"type": "quux"},
    "a type of numbers": {"type": 5},
    "properties as a list": {"type": "object", "properties": [1]},
    "a pattern that explodes": {"type": "string", "pattern": "^(a+)+$"},
    "a pattern with a look behind": {"type": "string", "pattern": "(?<=a)b"},
    "a pattern back": {"type": "string", "pattern": "(a)\\1"},
    "an enumeration of ten thousand": {"enum": list(range(10_000))},
    "an empty enumeration": {"enum": []},
    "a name of control characters": {"type": "object", "properties": {"\x00\n\"\\": {"type": "null"}},
                                     "required": ["\x00\n\"\\"]},
    "thousand required": {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(1000)},
                          "required": [f"k{i}" for i in range(1000)]},
}  # fmt: skip
PATTERNS = [
    "(a+)+$", "(a|a)*b", "(.*)*", "((a{1,100}){1,100}){1,100}", "a{1000000000}", "[", "(?P<x", "\\", "(" * 5000,
    "a|" * 20_000, "\\p{Greek}+", "(?=a)b", "\x00", ".{60000}", "(x+x+)+y", "[^\\x00-\\uffff]",
]  # fmt: skip
GRAMMARS = [
    "start: start",
    "start: a\na: b\nb: a",
    "start: (",
    'start: "a"* start start | ""',
    "start: /(/",
    "x" * 60_000,
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_schemas(calls: httpx.Client, path: str) -> None:
    for name, schema in SCHEMAS.items():
        for strict in (True, False):
            form: dict[str, Any] = {"name": "x", "schema": schema, "strict": strict}
            if path == "/v1/responses":
                more: dict[str, Any] = {"text": {"format": {"type": "json_schema", **form}}}
            else:
                more = {"response_format": {"type": "json_schema", "json_schema": form}}
            assert send(calls, path, {**BASE[path], **more}).status_code in (200, 400), name


def test_tools(calls: httpx.Client) -> None:
    for schema in SCHEMAS.values():
        function = {"name": "f", "parameters": schema, "strict": True}
        for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
            tools = [{"type": "function", "function": function}]
            send(calls, "/v1/chat/completions", {**CHAT, "tools": tools, "tool_choice": choice})
        for kind in ("auto", "any"):
            tool = {"name": "f", "input_schema": schema}
            send(calls, "/v1/messages", {**CHAT, "tools": [tool], "tool_choice": {"type": kind}})
    for name in ("", "a" * 10_000, "\x00", "f\n</tool_call>", "\ud800", "__class__", "f" * 64 + "é"):
        tools = [{"type": "function", "function": {"name": name, "parameters": {}}}]
        for choice in ("auto", "required"):
            send(calls, "/v1/chat/completions", {**CHAT, "tools": tools, "tool_choice": choice})
    many = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(2000)]
    for choice in ("auto", "required"):
        send(calls, "/v1/chat/completions", {**CHAT, "tools": many, "tool_choice": choice})


def test_patterns_and_grammars(calls: httpx.Client) -> None:
    for pattern in PATTERNS:
        send(calls, "/v1/completions", {**BASE["/v1/completions"], "guided_regex": pattern})
    for grammar in GRAMMARS:
        send(calls, "/v1/completions", {**BASE["/v1/completions"], "guided_grammar": grammar})
    for choice in ([], [""], ["a"] * 100_000, ["x" * 100_000], ["\x00"], ["a", "\ud800"]):
        send(calls, "/v1/completions", {**BASE["/v1/completions"], "guided_choice": choice})


NUMBERS = [10**9, 2**63, 10**30, -(2**63) - 1, -1, 0, 1e308, 5e-324, 0.5, True, "1"]
NUMERIC = ["n", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "temperature", "top_p",
           "top_k",
           "min_p", "seed", "logprobs", "top_logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty",
           "repetition_penalty", "priority", "best_of", "truncate_prompt_tokens"]  # fmt: skip


@pytest.mark.parametrize("path", GENERATE)
def test_numbers(calls: httpx.Client, path: str) -> None:
    for name in NUMERIC:
        for value in NUMBERS:
            send(calls, path, {**BASE[path], name: value})
        for word in (b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"1e-9999999999"):
            raw = json.dumps(BASE[path]).encode()[:-1] + b', "' + name.encode() + b'": ' + word + b"}"
            send(calls, path, raw)


@pytest.mark.full  # megabytes of JSON, which a busy machine reads slowly
@pytest.mark.parametrize("path", GENERATE)
def test_sizes(calls: httpx.Client, path: str) -> None:
    """Millions of entries where a handful is common."""
    for name in ("stop", "stop_sequences"):
        for value in (["x"] * 10**6, "x" * 10**6, ["x" * 10**5] * 64, [""], ["\x00"], ["\ud800"], [None], [1], [[]]):
            send(calls, path, {**BASE[path], name: value})
    for bias in ({str(i): 1 for i in range(300_000)}, {"x": 1}, {"-1": 1}, {"1" * 5000: 1}, {"٣": 1}, {"1": 1e300},
                 {"1": None}, {"99999999": 1}, {"²": 1}, {" 1": 1}, {"1_0": 1}, {"0": -100, "00": 100}, [],
                 "x"):  # fmt: skip
        send(calls, path, {**BASE[path], "logit_bias": bias})
    send(calls, path, {**BASE[path], "stop_token_ids": list(range(10**6))})
    send(calls, path, {**BASE[path], "stop_token_ids": [-1, 2**40]})
    for name in ("request_id", "user", "cache_salt", "model", "metadata", "previous_response_id", "session_id"):
        for value in ("x" * 10**6, "\x00", "\ud800", "../../etc/passwd", "\r\nx-injected: 1", {"a": "\udfff"}):
            answer = send(calls, path, {**BASE[path], name: value})
            assert "x-injected" not in answer.headers


@pytest.mark.full  # as above
def test_memory_is_bounded(calls: httpx.Client, server: RealServer) -> None:
    """Large bodies leave what an allocator keeps, once: the same ones again need nothing more."""
    bodies = [
        {"prompt": "hi", "stop": ["x"] * 10**6},
        {"prompt": "a" * 10**6},
        {"prompt": "hi", "logit_bias": {str(i): 1 for i in range(300_000)}},
        {"prompt": "hi", "guided_regex": "((a{1,100}){1,100}){1,100}"},
        {"prompt": "hi", "request_id": "x" * 10**7},
    ]
    sizes = []
    for _ in range(6):
        for body in bodies:
            send(calls, "/v1/completions", {"max_tokens": 1, **body})
        sizes.append(server.resident_bytes())
    # An allocator gives memory back when it likes: peaks are compared, not moments.
    assert max(sizes[3:]) - max(sizes[:3]) < 48 << 20, sizes


@pytest.mark.full  # as above
def test_texts(calls: httpx.Client) -> None:
    for text in ("\x00", "\ud800", "a" * 10**6, "\u202e\u0300" * 1000, "<|endoftext|>" * 500, "</think>" * 500,
                 "{{ 7 * 7 }}", "{% for i in range(10**9) %}{% endfor %}", "\N{GRINNING FACE}" * 300):  # fmt: skip
        send(calls, "/v1/completions", {"prompt": text, "max_tokens": 2})
        send(calls, "/v1/responses", {"input": text, "max_output_tokens": 2})
        send(calls, "/tokenize", {"prompt": text})
        for role in ("user", "system", "assistant", "tool", "developer", text[:50]):
            message = {"role": role, "content": text}
            for path in ("/v1/chat/completions", "/v1/messages"):
                send(calls, path, {**CHAT, "messages": [message, CHAT["messages"][0]]})
    send(calls, "/v1/chat/completions", {**CHAT, "messages": CHAT["messages"] * 20_000})
    send(calls, "/v1/completions", {"prompt": ["x"] * 100_000, "max_tokens": 1})
    send(calls, "/v1/completions", {"prompt": [[1]] * 2000, "n": 128, "max_tokens": 1})
    for tokens in ([-1], [2**63], [2**70], [10**9], list(range(512)) * 2000, [0.5], [True], [None]):
        send(calls, "/v1/completions", {"prompt": tokens, "max_tokens": 1})
        send(calls, "/detokenize", {"tokens": tokens})


def test_template_variables(calls: httpx.Client) -> None:
    for variables in ({"a": "x" * 10**6}, {"self": 1}, {"": 1}, {"range": 5}, {"messages": "x"}, {"tools": [[]]},
                      {"reasoning_effort": {"a": []}}, {"__class__": 1}, {"enable_thinking": "\ud800"},
                      {"x\x00": 1}):  # fmt: skip
        send(calls, "/v1/chat/completions", {**CHAT, "chat_template_kwargs": variables})


LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6) | st.sampled_from(["auto", "user", "function", "json_schema", "text", "", "\x00", "\ud800"])
)  # fmt: skip
NAMES = ["type", "name", "role", "content", "text", "function", "schema", "json_schema", "parameters", "input", "id"]
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=120, deadline=None)
@given(path=st.sampled_from(list(BASE)), data=st.data())
def test_any_fields_at_once(calls: httpx.Client, fields: dict[str, list[str]], path: str, data: st.DataObject) -> None:
    """Several of a route's own fields, each with any value."""
    chosen = data.draw(st.dictionaries(st.sampled_from(fields[path]), VALUES, min_size=1, max_size=4))
    answer = send(calls, path, {**BASE[path], **chosen})
    assert answer.status_code in (200, 400, 404), (chosen, answer.text[:300])


@pytest.fixture(scope="module")
def fields(calls: httpx.Client) -> dict[str, list[str]]:
    """The fields of each route, from the document that the server itself gives."""
    document = calls.get("/openapi.json").json()
    found = {}
    for path in BASE:
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        found[path] = sorted(document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]["properties"])
    return found
