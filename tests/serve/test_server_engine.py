"""The server in front of the real engine: the same tokens as without it, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("fastapi")

from live_server import live, until
from server_fakes import Bench, events_of, make_text
from test_server_live import hang_up

from glm5sdk.models.glm5 import Glm5ForCausalLM, preset
from glm5sdk.serve.async_engine import AsyncEngine
from glm5sdk.serve.config import EngineConfig
from glm5sdk.serve.engine import Engine
from glm5sdk.serve.server import ServerSettings, create_app

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "move",
            "parameters": {
                "type": "object",
                "properties": {"way": {"enum": ["left", "right"]}, "steps": {"enum": [1, 2, 3]}},
                "required": ["way", "steps"],
            },
        },
    }
]


class RealBench(Bench):
    """A `Bench` whose engine computes."""

    def __init__(self, drain_seconds: float = 30.0, **config: Any) -> None:
        torch.manual_seed(0)
        self.text = make_text()
        model_config = preset("tiny", vocab_size=320, num_hidden_layers=2, num_nextn_predict_layers=0)
        self.model = Glm5ForCausalLM(model_config.replace(eos_token_id=(256,), max_position_embeddings=2048)).eval()
        sizes = {"page_size": 16, "num_pages": 160, "max_model_len": 1800, "max_num_seqs": 4, **config}
        self.engine = AsyncEngine(Engine(self.model, self.text.tokenizer, EngineConfig(**sizes)))
        settings = ServerSettings(model_names=("tiny",), admin_key="boss", drain_seconds=drain_seconds)
        self.app = create_app(self.engine, settings, self.text)
        self.service = self.app.state.service

    def idle(self) -> bool:
        stats = self.engine.stats()
        free = stats.pages_free == stats.pages_total
        return free and stats.running == stats.waiting == 0 and not self.service.alive


@pytest.fixture(scope="module")
def bench() -> Iterator[RealBench]:
    made = RealBench()
    yield made
    made.engine.close()


def test_greedy_tokens_are_the_models_own(bench: RealBench) -> None:
    ids = bench.text.tokenizer.encode("The quick brown fox")
    body = {"prompt": ids, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = bench.post("/v1/completions", body).json()
    own = bench.model.generate(torch.tensor([ids]), max_new_tokens=24, ignore_eos=True)[0, len(ids) :].tolist()
    assert answer["choices"][0]["token_ids"] == own
    events = events_of(bench.post("/v1/completions", {**body, "stream": True}))
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == own
    text = bench.text.tokenizer.decode(own)
    assert "".join(event["choices"][0]["text"] for event in events) == answer["choices"][0]["text"] == text


def test_echo_gives_the_models_logprobs_bit_for_bit(bench: RealBench) -> None:
    ids = bench.text.tokenizer.encode("to be scored")
    body = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1}
    scores = bench.post("/v1/completions", body).json()["choices"][0]["logprobs"]["token_logprobs"]
    with torch.no_grad():
        own = bench.model.logprobs(torch.tensor([ids[:-1]]), torch.tensor([ids[1:]]))[0].tolist()
    assert scores == [None, *own]


def test_a_seed_repeats_and_is_reported(bench: RealBench) -> None:
    first = bench.chat(max_tokens=12, n=2, ignore_eos=True, return_token_ids=True).json()["choices"]
    seed = first[0]["seed"]
    assert first[1]["seed"] == seed + 1
    second = bench.chat(max_tokens=12, n=2, ignore_eos=True, return_token_ids=True, seed=seed).json()["choices"]
    assert [choice["token_ids"] for choice in second] == [choice["token_ids"] for choice in first]


def test_structured_output_and_forced_calls(bench: RealBench) -> None:
    pytest.importorskip("llguidance")
    off = {"chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 200}
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    choice = bench.chat(response_format=form, seed=3, **off).json()["choices"][0]
    if choice["finish_reason"] == "stop":  # white space may go on for long in a random model
        assert isinstance(json.loads(choice["message"]["content"])["ok"], bool)
    picked = bench.chat(guided_choice=["alpha", "beta"], **off).json()["choices"][0]
    assert picked["message"]["content"] in ("alpha", "beta") and picked["finish_reason"] == "stop"
    for body in ({"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "move"}}}):
        called = bench.chat(tools=TOOLS, parallel_tool_calls=False, **body, **off).json()["choices"][0]
        arguments = json.loads(called["message"]["tool_calls"][0]["function"]["arguments"])
        assert arguments["way"] in ("left", "right") and arguments["steps"] in (1, 2, 3)
        assert called["finish_reason"] == "tool_calls"
    refused = bench.chat(guided_regex="(", **off)
    assert refused.status_code == 400 and "structured output" in refused.text


def test_requests_that_can_never_run_are_refused_before_the_stream(bench: RealBench) -> None:
    for body in ({"max_tokens": 1800}, {"logit_bias": {"9999": 1}}):
        answer = bench.chat(stream=True, **body)
        assert answer.status_code == 400, answer.text


def test_random_clients_leave_nothing_behind(bench: RealBench) -> None:
    """Many at once; a third hangs up at some point, by cancelling the task that waits."""

    async def one(client: httpx.AsyncClient, number: int) -> int | None:
        stream = number % 2 == 0
        path = ("/v1/chat/completions", "/v1/messages", "/v1/responses")[number % 3]
        body = {"stream": stream, "input": f"q{number}", "max_output_tokens": 20} if path.endswith("responses") else {
            "messages": [{"role": "user", "content": f"q{number}" * (number % 5 + 1)}], "max_tokens": 20,
            "stream": stream,
        }  # fmt: skip
        call = asyncio.ensure_future(client.post(path, json=body))
        if number % 3 == 1:
            await asyncio.sleep(0.01 * (number % 7))
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call
            return None
        return (await call).status_code

    async def all_of_them() -> list[int | None]:
        async with bench.client() as client:
            return await asyncio.gather(*(one(client, number) for number in range(36)))

    statuses = asyncio.run(all_of_them())
    assert set(statuses) == {200, None}
    assert until(bench.idle), bench.engine.stats()


def test_hanging_up_frees_the_cache(bench: RealBench) -> None:
    body = {**CHAT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with live(bench) as address:
        before = bench.engine.stats().aborted
        hang_up(address, "/v1/chat/completions", body, b"data: ")
        assert until(lambda: bench.engine.stats().aborted == before + 1)
        assert until(bench.idle), bench.engine.stats()


def test_pause_resume_and_unknown_weights(bench: RealBench) -> None:
    boss = {"x-api-key": "boss"}
    assert bench.post("/admin/pause", b"", **boss).status_code == 200
    assert bench.post("/admin/resume", b"", **boss).status_code == 200
    assert bench.chat(max_tokens=2).status_code == 200
    missing = bench.post("/admin/update_weights", {"path": "/nowhere"}, **boss)
    assert missing.status_code == 400 and "/nowhere" in missing.text
    assert bench.post("/admin/update_weights", {"paths": 1}, **boss).status_code == 400
    assert bench.post("/admin/control", {"command": "flush_cache"}, **boss).status_code == 200
    stats = bench.get("/admin/stats", **boss).json()
    assert stats["info"]["max_model_len"] == 1800 and stats["stats"]["finished"] > 0


def test_a_closed_engine_is_unavailable() -> None:
    made = RealBench()
    made.engine.close()
    assert made.chat(max_tokens=2).status_code == 503
    assert made.post("/v1/messages", {**CHAT, "max_tokens": 2}).json()["error"]["type"] == "overloaded_error"


def test_what_outlasts_the_drain_is_aborted_and_told() -> None:
    made = RealBench(drain_seconds=0.3)
    long = {"max_tokens": 1700, "ignore_eos": True}
    texts: dict[str, str] = {}

    def ask(address: str, name: str, path: str, body: dict[str, Any]) -> None:
        texts[name] = httpx.post(address + path, json=body, timeout=60).text

    bodies = {
        "stream": ("/v1/chat/completions", {**CHAT, **long, "stream": True}),
        "whole": ("/v1/chat/completions", {**CHAT, **long}),
        "anthropic": ("/v1/messages", {**CHAT, "max_tokens": 1700, "temperature": 0, "stream": True}),
    }
    try:
        with live(made) as address:
            threads = [
                threading.Thread(target=ask, args=(address, name, path, body)) for name, (path, body) in bodies.items()
            ]
            for thread in threads:
                thread.start()
            assert until(lambda: len(made.service.alive) == len(bodies))
            made.server.handle_exit(signal.SIGTERM, None)  # type: ignore[attr-defined]
            for thread in threads:
                thread.join(30)
        assert '"finish_reason":"abort"' in texts["stream"] and texts["stream"].endswith("data: [DONE]\n\n")
        assert json.loads(texts["whole"])["choices"][0]["finish_reason"] == "abort"
        assert "event: error" in texts["anthropic"] and "aborted" in texts["anthropic"]
        assert until(made.idle)
    finally:
        made.engine.close()
