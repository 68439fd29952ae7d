"""POST /v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from server_fakes import Bench, events_of, fake_logprob


def complete(bench: Bench, prompt: Any, **more: Any) -> dict[str, Any]:
    answer = bench.post("/v1/completions", {"prompt": prompt, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_form_of_a_prompt() -> None:
    bench = Bench(lambda prompt, index: f"<{prompt}{index}>")
    ids = bench.text.tokenizer.encode
    for prompt, texts in (
        ("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), (ids("ab"), ["ab"]), ([ids("ab"), ids("c")], ["ab", "c"]),
    ):  # fmt: skip
        answer = complete(bench, prompt, n=2)
        assert [choice["text"] for choice in answer["choices"]] == [f"<{t}{i}>" for t in texts for i in range(2)]
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(texts)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))


@pytest.mark.parametrize("prompt", [[], ["a", 1], [1, [2]], [[]], "", [-1], [512], [10**40], ["a", ""], None, {}, 1.5])
def test_prompts_that_are_none(prompt: Any) -> None:
    bench = Bench()
    answer = bench.post("/v1/completions", {"prompt": prompt})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not bench.engine.requests


def test_default_length_and_finish_reason() -> None:
    bench = Bench("x" * 40)
    assert complete(bench, "a")["choices"][0]["text"] == "x" * 16
    assert complete(bench, "a")["choices"][0]["finish_reason"] == "length"
    assert complete(bench, "a", max_tokens=100)["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_scores_the_prompt(as_ids: bool) -> None:
    bench = Bench("zzz")
    ids = bench.text.tokenizer.encode("aö")
    choice = complete(bench, ids if as_ids else "aö", echo=True, logprobs=2, max_tokens=1)["choices"][0]
    assert choice["text"] == "aöz"
    scores = choice["logprobs"]
    assert scores["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xb6", "z"]
    assert scores["token_logprobs"] == [
        None, *(fake_logprob(token, 0).logprob for token in [*ids[1:], *bench.text.tokenizer.encode("z")]),
    ]  # fmt: skip
    assert scores["text_offset"] == [0, 1, 1, 2]
    assert scores["top_logprobs"][0] is None and len(scores["top_logprobs"][1]) == 3
    assert bench.engine.requests[0][1].prompt_logprobs == 2


def test_max_tokens_zero_scores_and_writes_nothing() -> None:
    bench = Bench("zzz")
    answer = complete(bench, "ab", echo=True, logprobs=0, max_tokens=0)
    choice = answer["choices"][0]
    assert choice["text"] == "ab" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert answer["usage"]["completion_tokens"] == 0
    events = events_of(bench.post("/v1/completions", {"prompt": "ab", "max_tokens": 0, "stream": True, "echo": True}))
    assert "".join(event["choices"][0]["text"] for event in events) == "ab"
    assert events[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("pace", [1, 3, 50])
def test_stream_equals_whole_answer(pace: int) -> None:
    bench = Bench(lambda prompt, index: f"{prompt}-{index}-wörld 🙂", pace=pace)
    body = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 60, "logprobs": 1, "stream_options": {"include_usage": True}}
    whole = complete(bench, **{k: v for k, v in body.items() if k != "stream_options"})
    events = events_of(bench.post("/v1/completions", {**body, "stream": True}))
    texts, tokens, offsets = [""] * 4, [[] for _ in range(4)], [[] for _ in range(4)]
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += choice["logprobs"]["tokens"]
            offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert tokens == [choice["logprobs"]["tokens"] for choice in whole["choices"]]
    if pace != 3:  # a piece that ends inside a character counts it with the next one
        assert offsets == [choice["logprobs"]["text_offset"] for choice in whole["choices"]]
    assert events[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    "more, param",
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"seed": 2**70}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"priority": 2**40}, "priority"),
        ({"temperature": "warm"}, "temperature"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"request_id": "x" * 200}, "request_id"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ],
)
def test_refusals_name_the_field(more: dict[str, Any], param: str) -> None:
    bench = Bench()
    answer = bench.post("/v1/completions", {"prompt": "a", **more})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not bench.engine.requests


def test_best_of_equal_to_n_is_fine() -> None:
    assert len(complete(Bench(), "a", n=2, best_of=2)["choices"]) == 2


def test_tokenize_and_back() -> None:
    bench = Bench()
    found = bench.post("/tokenize", {"prompt": "hö<|user|>", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == 4 and found["max_model_len"] == 4096
    assert found["token_strs"] == ["h", "�", "�", "<|user|>"]
    assert bench.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "hö<|user|>"}
    chat = bench.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False})
    assert bench.text.tokenizer.decode(chat.json()["tokens"], skip_special_tokens=False) == "[gMASK]<sop><|user|>hi"
    assert bench.post("/tokenize", {}).status_code == 400
    assert bench.post("/detokenize", {"tokens": [-1]}).status_code == 400
