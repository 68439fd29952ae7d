"""POST /v1/responses: items, events, and answers kept for the next turn."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from server_fakes import Bench

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call>"


def ask(bench: Bench, given: Any = "hi", **more: Any) -> dict[str, Any]:
    answer = bench.post("/v1/responses", {"input": given, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(bench: Bench, index: int = -1) -> str:
    return bench.text.tokenizer.decode(bench.engine.requests[index][0], skip_special_tokens=False)


def stream(bench: Bench, **body: Any) -> list[dict[str, Any]]:
    answer = bench.post("/v1/responses", {"input": "hi", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    found = []
    for part in answer.text.strip().split("\n\n"):
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [payload["sequence_number"] for payload in found] == list(range(len(found)))
    return found


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(entry) for entry in value]
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "created_at", "completed_at")}
    return value


def test_whole_answer() -> None:
    bench = Bench(f"hm</think>Hello{CALL}")
    body = ask(bench, instructions="be kind", tools=[WEATHER], reasoning={"effort": "high"})
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call"]
    assert body["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert body["output"][1]["content"][0]["text"] == "Hello"
    assert json.loads(body["output"][2]["arguments"]) == {"city": "Köln"}
    assert body["status"] == "completed" and body["object"] == "response" and body["weight_version"] == "w1"
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 2}
    assert "<|system|>Reasoning Effort: High<|system|>be kind<|user|>hi<|assistant|><think>" in prompt_of(bench)


@pytest.mark.parametrize("pace", [1, 5, 100])
def test_stream_order_and_content(pace: int) -> None:
    bench = Bench(f"hm</think>Hello{CALL}", pace=pace)
    whole = ask(bench, tools=[WEATHER])
    events = stream(bench, tools=[WEATHER])
    kinds = [event["type"].removeprefix("response.") for event in events]
    collapsed = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "{}.delta", "{}.done", "output_item.done"]
    assert collapsed == [
        "created", "in_progress",
        *(kind.format("reasoning_text") for kind in text),
        *(kind.format("output_text") for kind in text),
        *(kind.format("function_call_arguments") for kind in call),
        "completed",
    ]  # fmt: skip
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    for index, item in enumerate(done):
        deltas = "".join(e["delta"] for e in events if e.get("output_index") == index and e["type"].endswith(".delta"))
        assert deltas == (item["arguments"] if index == 2 else item["content"][0]["text"])


def test_the_next_turn_sees_the_one_before() -> None:
    bench = Bench(lambda prompt, _: "first</think>one" if "second" not in prompt else "</think>two")
    first = ask(bench, "start", instructions="only once")
    second = ask(bench, "second", previous_response_id=first["id"])
    assert prompt_of(bench) == "[gMASK]<sop><|user|>start<|assistant|></think>one<|user|>second<|assistant|><think>"
    third = bench.post(
        "/v1/responses",
        {
            "input": "third second",
            "previous_response_id": second["id"],
            "chat_template_kwargs": {"clear_thinking": False},
        },
    )
    assert third.status_code == 200
    assert prompt_of(bench) == (
        "[gMASK]<sop><|user|>start<|assistant|><think>first</think>one<|user|>second<|assistant|></think>two"
        "<|user|>third second<|assistant|><think>"
    )


def test_results_of_calls_may_follow_by_id_or_be_sent_whole() -> None:
    bench = Bench(lambda prompt, _: "</think>done" if "sun" in prompt else f"t</think>{CALL}")
    first = ask(bench, "w", tools=[WEATHER])
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    ask(bench, [result], tools=[WEATHER], previous_response_id=first["id"])
    by_id = prompt_of(bench)
    ask(bench, [{"role": "user", "content": "w"}, *first["output"], result], tools=[WEATHER])
    assert prompt_of(bench) == by_id
    assert by_id.endswith(
        f"<think>t</think>{CALL}<|observation|><tool_response>sun</tool_response><|assistant|><think>"
    )


def test_keeping_is_bounded_and_can_be_declined() -> None:
    bench = Bench("</think>x", max_stored_responses=2)
    ids = [ask(bench)["id"] for _ in range(3)]
    assert [bench.get(f"/v1/responses/{name}").status_code for name in ids] == [404, 200, 200]
    assert bench.get(f"/v1/responses/{ids[2]}/input_items").json()["data"][0]["content"] == "hi"
    declined = ask(bench, store=False)["id"]
    assert bench.get(f"/v1/responses/{declined}").status_code == 404
    gone = bench.post("/v1/responses", {"input": "x", "previous_response_id": ids[0]})
    assert gone.status_code == 400 and gone.json()["error"]["param"] == "previous_response_id"

    async def delete() -> httpx.Response:
        async with bench.client() as client:
            return await client.delete(f"/v1/responses/{ids[2]}")

    assert asyncio.run(delete()).json()["deleted"] is True
    assert bench.get(f"/v1/responses/{ids[2]}").status_code == 404
    small = Bench("</think>x", max_stored_bytes=10)
    assert small.get(f"/v1/responses/{ask(small)['id']}").status_code == 404


def test_incomplete_and_failed() -> None:
    bench = Bench("</think>abcdef")
    short = ask(bench, max_output_tokens=3)
    assert short["status"] == "incomplete" and short["incomplete_details"] == {"reason": "max_output_tokens"}
    assert stream(bench, max_output_tokens=3)[-1]["type"] == "response.incomplete"
    bench.engine.broken = "out of luck"
    last = stream(bench)[-1]
    assert last["type"] == "response.failed" and last["response"]["error"]["message"] == "out of luck"


@pytest.mark.parametrize(
    "more, param",
    [
        ({"input": []}, "messages"),
        ({"input": [{"type": "message", "role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "["}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"max_output_tokens": 0}, "max_tokens"),
    ],
)
def test_refusals_name_the_field(more: dict[str, Any], param: str) -> None:
    bench = Bench()
    answer = bench.post("/v1/responses", {"input": "x", **more})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not bench.engine.requests
