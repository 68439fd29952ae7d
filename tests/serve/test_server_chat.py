"""POST /v1/chat/completions against an engine that says what it is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi")

from server_fakes import Bench, events_of, fake_logprob

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)


def joined(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What a client makes of a stream."""
    whole: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}, "finish": None, "role": None}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            whole["role"] = delta.get("role", whole["role"])
            whole["content"] += delta.get("content") or ""
            whole["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                own = whole["calls"].setdefault(call["index"], {"name": "", "arguments": "", "id": None})
                own["name"] += call["function"].get("name", "")
                own["arguments"] += call["function"].get("arguments", "")
                own["id"] = call.get("id") or own["id"]
            whole["finish"] = choice["finish_reason"] or whole["finish"]
    return whole


def test_whole_answer() -> None:
    bench = Bench("think first</think>Hello wörld")
    answer = bench.chat("hi", seed=5)
    body = answer.json()
    message = body["choices"][0]["message"]
    assert (message["role"], message["content"], message["reasoning_content"]) == (
        "assistant", "Hello wörld", "think first",
    )  # fmt: skip
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["seed"] == 5
    assert body["object"] == "chat.completion" and body["model"] == "tiny" and body["id"].startswith("chatcmpl-")
    assert body["weight_version"] == answer.headers["x-glm5-weight-version"] == "w1"
    prompt, params, _ = bench.engine.requests[0]
    spelled = bench.text.tokenizer.decode(prompt, skip_special_tokens=False)
    assert spelled == "[gMASK]<sop><|user|>hi<|assistant|><think>"
    made = len(bench.text.tokenizer.encode("think first</think>Hello wörld")) + 1
    assert body["usage"] == {
        "prompt_tokens": len(prompt), "completion_tokens": made, "total_tokens": len(prompt) + made,
        "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip
    assert params.max_tokens is None and params.seed == 5


@pytest.mark.parametrize("pace", [1, 2, 3, 7, 100])
def test_stream_equals_whole_answer(pace: int) -> None:
    bench = Bench(lambda _, index: f"so {index}</think>Änswer {index}{CALL}{CALL}", pace=pace)
    asked = {"tools": [WEATHER], "n": 2}
    whole = bench.chat(**asked).json()["choices"]
    events = events_of(bench.chat(stream=True, **asked))
    for index in range(2):
        stream, message = joined(events, index), whole[index]["message"]
        assert stream["role"] == "assistant"
        assert stream["content"] == message["content"] == f"Änswer {index}"
        assert stream["reasoning_content"] == message["reasoning_content"] == f"so {index}"
        assert stream["finish"] == whole[index]["finish_reason"] == "tool_calls"
        names = [(call["name"], json.loads(call["arguments"])) for call in stream["calls"].values()]
        assert names == [("weather", {"city": "Köln", "days": 3})] * 2
        assert names == [
            (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]
        ]
        assert len({call["id"] for call in stream["calls"].values()}) == 2


def test_stream_usage_comes_last_and_only_when_asked_for() -> None:
    bench = Bench("x</think>abc")
    plain = events_of(bench.chat(stream=True))
    assert all("usage" not in event and event["choices"] for event in plain)
    events = events_of(bench.chat(stream=True, stream_options={"include_usage": True}))
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 6
    each = events_of(bench.chat(stream=True, stream_options={"continuous_usage_stats": True}))
    counts = [event["usage"]["completion_tokens"] for event in each]
    assert counts == sorted(counts) and counts[-1] == 6


def test_logprobs_have_bytes_and_best_tokens() -> None:
    bench = Bench("</think>ö")
    whole = bench.chat(logprobs=True, top_logprobs=3).json()["choices"][0]["logprobs"]["content"]
    streamed = [
        entry
        for event in events_of(bench.chat(logprobs=True, top_logprobs=3, stream=True))
        for choice in event["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == whole
    assert [entry["bytes"] for entry in whole[1:3]] == [[0xC3], [0xB6]]
    assert [entry["bytes"] for entry in whole[:1]] == [list(b"</think>")]
    ids = bench.text.tokenizer.encode("</think>ö")
    assert [entry["logprob"] for entry in whole[:3]] == [fake_logprob(token, 0).logprob for token in ids]
    assert all(len(entry["top_logprobs"]) == 3 for entry in whole)
    assert bench.engine.requests[0][1].logprobs == 3


def test_thinking_off_and_effort_reach_the_template() -> None:
    bench = Bench("just text </think> here")
    answer = bench.chat(chat_template_kwargs={"enable_thinking": False}).json()
    assert answer["choices"][0]["message"]["content"] == "just text </think> here"
    assert "reasoning_content" not in answer["choices"][0]["message"]
    bench.chat(reasoning_effort="none")
    bench.chat(reasoning_effort="high")
    bench.chat(thinking={"type": "disabled"})
    prompts = [bench.text.tokenizer.decode(ids, skip_special_tokens=False) for ids, _, _ in bench.engine.requests]
    assert prompts[0] == prompts[1] == prompts[3] == "[gMASK]<sop><|user|>hi<|assistant|></think>"
    assert prompts[2] == "[gMASK]<sop><|system|>Reasoning Effort: High<|user|>hi<|assistant|><think>"


def test_a_conversation_with_calls_is_rendered() -> None:
    bench = Bench("</think>ok")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn", "days": 2}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
    ]
    bench.post("/v1/chat/completions", {"messages": messages})
    assert bench.text.tokenizer.decode(bench.engine.requests[0][0], skip_special_tokens=False) == (
        "[gMASK]<sop><|system|>be brief<|user|>ab<|assistant|><think>hm</think>"
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Bonn</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
        "<|observation|><tool_response>sun</tool_response><tool_response>rain</tool_response><|assistant|><think>"
    )


def test_tool_choice() -> None:
    bench = Bench(f"</think>{CALL}")
    none = bench.chat(tools=[WEATHER], tool_choice="none").json()["choices"][0]
    assert none["message"]["content"] == CALL and none["finish_reason"] == "stop"
    bench.chat(tools=[WEATHER], tool_choice="auto")
    bench.chat(tools=[WEATHER], tool_choice="required")
    named = {"type": "function", "function": {"name": "weather"}}
    bench.chat(tools=[WEATHER], tool_choice=named)
    bench.chat(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    structured = [params.structured for _, params, _ in bench.engine.requests]
    assert structured[:2] == [None, None]
    assert structured[2].kind == structured[3].kind == "grammar"
    assert "start: call+" in structured[2].value and "start: call\n" in structured[3].value
    assert structured[3].value == structured[4].value
    assert structured[2].after_reasoning
    wrong = bench.chat(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "nope"}})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "tool_choice"
    assert bench.chat(tool_choice="required").status_code == 400


def test_extensions_reach_the_engine() -> None:
    bench = Bench("</think>x")
    answer = bench.chat(
        ignore_eos=True, min_tokens=2, top_k=5, min_p=0.1, repetition_penalty=1.5, stop_token_ids=[9], stop="ZZ",
        include_stop_str_in_output=True, skip_special_tokens=False, priority=-3, cache_salt="s",
        max_completion_tokens=9,
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={"5": 3}, return_token_ids=True, request_id="mine",
        n=2, temperature=0, top_p=0.5, max_tokens=4,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    ids, params, others = bench.engine.requests[0]
    assert (params.ignore_eos, params.min_tokens, params.top_k, params.min_p) == (True, 2, 5, 0.1)
    assert (params.repetition_penalty, params.stop_token_ids, params.stop) == (1.5, (9,), ("ZZ",))
    assert params.include_stop_str_in_output and not params.skip_special_tokens
    assert (params.presence_penalty, params.frequency_penalty, params.logit_bias) == (0.5, -0.5, {5: 3.0})
    assert (params.n, params.temperature, params.top_p, params.max_tokens) == (2, 0, 0.5, 9)
    assert others == {"request_id": "chatcmpl-mine", "priority": -3, "cache_salt": "s", "adapter": None}
    assert answer.json()["id"] == "chatcmpl-mine" and answer.json()["prompt_token_ids"] == ids
    assert answer.json()["choices"][1]["token_ids"] == [*bench.text.tokenizer.encode("</think>x"),
                                                        bench.engine.info.stop_token_ids[0]]  # fmt: skip


def test_structured_output_under_all_its_names() -> None:
    bench = Bench("</think>{}")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
        {"structured_outputs": {"json": schema}},
        {"guided_json": json.dumps(schema)},
        {"structured_outputs": {"regex": "a+"}},
        {"guided_choice": ["a", "b"]},
        {"guided_grammar": "start: 'a'", "chat_template_kwargs": {"enable_thinking": False}},
        {"response_format": {"type": "text"}},
    ]
    for more in asked:
        assert bench.chat(**more).status_code == 200
    found = [params.structured for _, params, _ in bench.engine.requests]
    assert [one and (one.kind, one.value) for one in found] == [
        ("json_object", None), ("json_schema", schema), ("json_schema", schema), ("json_schema", schema),
        ("regex", "a+"), ("choice", ["a", "b"]), ("grammar", "start: 'a'"), None,
    ]  # fmt: skip
    assert [one.after_reasoning for one in found if one] == [True] * 6 + [False]
    assert bench.chat(guided_regex="a", guided_choice=["b"]).status_code == 400


def test_prompt_logprobs() -> None:
    bench = Bench("</think>x")
    answer = bench.chat(prompt_logprobs=1).json()
    prompt = bench.engine.requests[0][0]
    assert answer["prompt_logprobs"][0] is None
    assert [list(entry)[-1] for entry in answer["prompt_logprobs"][1:]] == [str(token) for token in prompt[1:]]
    assert bench.chat(prompt_logprobs=1, stream=True).status_code == 400


def test_tags_that_a_tokenizer_marks_special_still_reach_the_parser() -> None:
    bench = Bench(f"hm</think>Hi{CALL}")
    bench.text.tags_are_special = True
    try:
        message = bench.chat(tools=[WEATHER], skip_special_tokens=True).json()["choices"][0]["message"]
        bench.post("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200})
    finally:
        bench.text.tags_are_special = False
    assert message["reasoning_content"] == "hm" and message["tool_calls"][0]["function"]["name"] == "weather"
    assert [params.skip_special_tokens for _, params, _ in bench.engine.requests] == [False, False]


@pytest.mark.parametrize(
    "field, value",
    [
        ("functions", [{"name": "f"}]), ("function_call", "auto"), ("audio", {"voice": "x"}), ("modalities", ["audio"]),
        ("web_search_options", {"a": 1}), ("continue_final_message", True), ("add_generation_prompt", False),
        ("chat_template", "x"), ("documents", [{}]), ("bad_words", ["x"]), ("allowed_token_ids", [1]), ("echo", True),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_not_ignored(field: str, value: Any) -> None:
    bench = Bench("</think>x")
    answer = bench.chat(**{field: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    assert answer.json()["error"]["code"].startswith("unsupported")
    assert not bench.engine.requests
