"""In every protocol a whole answer is what its own stream adds up to, whatever the model writes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from server_fakes import Bench

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "f", "a", "b", "12", "1e999", " ", "\n", "Größe 🙂", '"\\', "<", "</", "f<arg_key>a</arg_key><arg_value>",
    "<tool_call>f<arg_key>b</arg_key><arg_value>7</arg_value></tool_call>",
    "<tool_call>f<arg_key>b</arg_key><arg_value>-1.5e400</arg_value></tool_call>",
]  # fmt: skip
BENCH = Bench(lambda prompt, index: _said[0])
_said = [""]


def payloads(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.split("\n") if line.startswith("data: ") and line != "data: [DONE]"]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def both(path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    whole, stream = BENCH.post(path, body), BENCH.post(path, {**body, "stream": True})
    assert whole.status_code == stream.status_code == 200
    return whole.json(), payloads(stream.text)


def check_chat(messages: list[dict[str, Any]]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    whole, chunks = both("/v1/chat/completions", {"messages": messages, "tools": tools})
    message = whole["choices"][0]["message"]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
    assert "".join(d.get("reasoning_content", "") for d in deltas) == message.get("reasoning_content", "")
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", []):
            own = calls.setdefault(call["index"], ["", ""])
            own[0] += call["function"].get("name", "")
            own[1] += call["function"].get("arguments", "")
    expected = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", [])]
    assert list(calls.values()) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


def check_messages(messages: list[dict[str, Any]]) -> None:
    tools = [{"name": "f", "input_schema": SCHEMA}]
    body = {"messages": messages, "tools": tools, "max_tokens": 2000, "thinking": {"type": "adaptive"}}
    whole, events = both("/v1/messages", body)
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[-1]["json"] += delta.get("partial_json", "")
            for field in ("text", "thinking"):
                if delta["type"] == f"{field}_delta":
                    blocks[-1][field] += delta[field]
    for block in blocks:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block |= {"input": json.loads(arguments), "id": None}
    assert blocks == [block | {"id": None} if block["type"] == "tool_use" else block for block in whole["content"]]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]


def check_responses(text: str) -> None:
    tools = [{"type": "function", "name": "f", "parameters": SCHEMA}]
    whole, events = both("/v1/responses", {"input": text, "tools": tools, "store": False})
    grown: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            grown[event["output_index"]] = grown.get(event["output_index"], "") + event["delta"]
    output = events[-1]["response"]["output"]
    for index, item in enumerate(output):
        content = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert grown.get(index, "") == content
    hide = ("id", "call_id")
    assert [{k: v for k, v in item.items() if k not in hide} for item in output] == [
        {k: v for k, v in item.items() if k not in hide} for item in whole["output"]
    ]
    assert events[-1]["response"]["status"] == whole["status"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=14), st.integers(1, 9), st.booleans())
def test_streams_add_up(pieces: list[str], pace: int, thinks: bool) -> None:
    _said[0] = ("hm</think>" if thinks else "") + "".join(pieces)
    BENCH.engine.pace = pace
    messages = [{"role": "user", "content": "go"}]
    check_chat(messages)
    check_messages(messages)
    check_responses("go")


@pytest.mark.parametrize("number", ["1e999", "-1.5e400", "9" * 400, "[1e999, {}]", "1e-999", '{"x": "\\ud800"}'])
def test_numbers_of_any_size_come_through_and_go_back(number: str) -> None:
    call = f"<tool_call>f<arg_key>b</arg_key><arg_value>{number}</arg_value></tool_call>"
    _said[0], BENCH.engine.pace = f"</think>{call}", 50
    messages = [{"role": "user", "content": "go"}]
    check_chat(messages)
    check_messages(messages)
    check_responses("go")
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    message = BENCH.post("/v1/chat/completions", {"messages": messages, "tools": tools}).json()["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]).keys() == {"b"}
    answer = BENCH.post("/v1/chat/completions", {"messages": [*messages, message], "tools": tools})
    assert answer.status_code == 200, answer.text
    if "{" not in number and "e-" not in number:
        assert call in BENCH.text.tokenizer.decode(BENCH.engine.requests[-1][0], skip_special_tokens=False)
    asked = {"input": "go", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}
    first = BENCH.post("/v1/responses", asked)
    assert first.status_code == 200
    again = BENCH.post("/v1/responses", {"input": "on", "previous_response_id": first.json()["id"]})
    assert again.status_code == 200, again.text
