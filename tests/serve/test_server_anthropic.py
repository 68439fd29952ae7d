"""POST /v1/messages: Anthropic's blocks and events."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from server_fakes import Bench

WEATHER = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
CALL = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)
THINK = {"type": "enabled", "budget_tokens": 1024}


def ask(bench: Bench, messages: Any = "hi", **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return bench.post("/v1/messages", {"model": "tiny", "max_tokens": 200, "messages": messages, **more})


def named_events(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    assert answer.status_code == 200, answer.text
    found = []
    for part in answer.text.strip().split("\n\n"):
        name, data = part.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == payload["type"] for name, payload in found)
    return found


def test_whole_answer() -> None:
    bench = Bench(f"hm</think>Hello{CALL}")
    body = ask(bench, thinking=THINK, tools=[WEATHER], system="be kind").json()
    kinds = [block["type"] for block in body["content"]]
    assert kinds == ["thinking", "text", "tool_use"]
    assert body["content"][0]["thinking"] == "hm" and body["content"][1]["text"] == "Hello"
    assert body["content"][2]["name"] == "weather" and body["content"][2]["input"] == {"city": "Köln", "days": 3}
    assert (body["type"], body["role"], body["stop_reason"], body["stop_sequence"]) == (
        "message", "assistant", "tool_use", None,
    )  # fmt: skip
    prompt = bench.engine.requests[0][0]
    assert body["usage"]["input_tokens"] == len(prompt) - 1 and body["usage"]["cache_read_input_tokens"] == 1
    assert body["weight_version"] == "w1"
    spelled = bench.text.tokenizer.decode(prompt, skip_special_tokens=False)
    assert "<|system|>be kind<|user|>hi<|assistant|><think>" in spelled and '"name": "weather"' in spelled


@pytest.mark.parametrize("pace", [1, 4, 100])
def test_stream_has_the_protocols_order_and_the_same_blocks(pace: int) -> None:
    bench = Bench(f"hm</think>Hello{CALL}{CALL}", pace=pace)
    asked = {"thinking": THINK, "tools": [WEATHER]}
    whole = ask(bench, **asked).json()
    events = named_events(ask(bench, stream=True, **asked))
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "ping"] and names[-2:] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    open_block = None
    for name, payload in events:
        if name == "content_block_start":
            assert open_block is None and payload["index"] == len(blocks)
            open_block = payload["index"]
            blocks.append({**payload["content_block"], "json": ""})
        elif name == "content_block_delta":
            assert payload["index"] == open_block
            delta = payload["delta"]
            for field in ("thinking", "text"):
                if delta["type"] == f"{field}_delta":
                    blocks[-1][field] += delta[field]
            blocks[-1]["json"] += delta.get("partial_json", "")
        elif name == "content_block_stop":
            assert payload["index"] == open_block
            open_block = None
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
            block["id"] = None
    expected = [{**block, "id": None} if block["type"] == "tool_use" else block for block in whole["content"]]
    assert blocks == expected
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_history_with_tool_results() -> None:
    bench = Bench("ok")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "sky?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "call it", "signature": ""},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    answer = ask(bench, messages)
    assert answer.status_code == 200, answer.text
    spelled = bench.text.tokenizer.decode(bench.engine.requests[0][0], skip_special_tokens=False)
    assert spelled == (
        "[gMASK]<sop><|user|>the sky?<|assistant|></think>Let me look."
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Bonn</arg_value></tool_call>"
        "<|observation|><tool_response>sun</tool_response><|user|>and?<|assistant|></think>"
    )
    counted = bench.post("/v1/messages/count_tokens", {"model": "tiny", "messages": messages})
    assert counted.json() == {"input_tokens": len(bench.engine.requests[0][0])}


def test_stop_reasons() -> None:
    bench = Bench("abcdef")
    assert ask(bench, max_tokens=3).json()["stop_reason"] == "max_tokens"
    assert ask(bench).json()["stop_reason"] == "end_turn"
    ask(bench, stop_sequences=["X"], temperature=0.5, top_p=0.9, top_k=3, seed=4)
    params = bench.engine.requests[-1][1]
    assert (params.stop, params.temperature, params.top_p, params.top_k, params.seed) == (("X",), 0.5, 0.9, 3, 4)


def test_tool_choice_and_formats() -> None:
    bench = Bench("{}")
    ask(bench, tools=[WEATHER], tool_choice={"type": "any"})
    ask(bench, tools=[WEATHER], tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True})
    ask(bench, output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})
    found = [params.structured for _, params, _ in bench.engine.requests]
    assert "start: call+" in found[0].value and "start: call\n" in found[1].value
    assert (found[2].kind, found[2].value) == ("json_schema", {"type": "object"})
    spelled = bench.text.tokenizer.decode(bench.engine.requests[0][0], skip_special_tokens=False)
    assert "weather" in spelled
    ask(bench, tools=[WEATHER], tool_choice={"type": "none"})
    assert "weather" not in bench.text.tokenizer.decode(bench.engine.requests[-1][0], skip_special_tokens=False)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    "status, kind, body",
    [
        (400, "invalid_request_error", {"max_tokens": None}),
        (400, "invalid_request_error", {"messages": []}),
        (400, "invalid_request_error", {"messages": [{"role": "user", "content": []}]}),
        (400, "invalid_request_error", {"messages": [{"role": "user", "content": [IMAGE]}]}),
        (400, "invalid_request_error", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        (400, "invalid_request_error", {"messages": [{"role": "assistant", "content": "I"}]}),
        (400, "invalid_request_error", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        (400, "invalid_request_error", {"tool_choice": {"type": "tool"}}),
        (400, "invalid_request_error", {"max_tokens": 10**6}),
        (404, "not_found_error", {"model": "claude"}),
    ],
)
def test_errors_have_anthropics_shape(status: int, kind: str, body: dict[str, Any]) -> None:
    answer = ask(Bench(), **body)
    assert answer.status_code == status, answer.text
    assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == kind
    assert answer.json()["error"]["message"]


def test_an_error_in_the_stream_is_an_event() -> None:
    bench = Bench("abc")
    bench.engine.broken = "out of luck"
    events = named_events(ask(bench, stream=True))
    assert events[-1] == ("error", {"type": "error", "error": {"type": "api_error", "message": "out of luck"}})
