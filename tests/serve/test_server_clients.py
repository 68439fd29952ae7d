"""Clients that people have, unchanged, over a real connection; each is skipped where it is not installed."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from live_server import live
from server_fakes import Bench

pytestmark = pytest.mark.filterwarnings("ignore")  # the clients' own

CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call>"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}}
HI: Any = [{"role": "user", "content": "hi"}]


def says(prompt: str, index: int) -> str:
    """What the fake model says: thinks if it may, calls the tool once, then answers."""
    thought = "hm</think>" if prompt.endswith("<think>") else ""
    call = CALL if "# Tools" in prompt and "<tool_response>" not in prompt else ""
    return f"{thought}Hello {index}{call}"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Bench]]:
    bench = Bench(says, pace=2, api_keys=("secret",), max_queued_requests=50)
    with live(bench) as address:
        yield address, bench


@pytest.fixture
def openai_client(server: tuple[str, Bench]) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="secret", max_retries=0, timeout=30) as client:
        yield client


def test_openai_chat(openai_client: Any) -> None:
    answer = openai_client.chat.completions.create(model="tiny", messages=HI, n=2, logprobs=True, top_logprobs=2)
    assert [choice.message.content for choice in answer.choices] == ["Hello 0", "Hello 1"]
    assert answer.choices[0].message.reasoning_content == "hm"
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert answer.weight_version == "w1" and answer.usage.total_tokens > 0
    chunks = list(
        openai_client.chat.completions.create(
            model="tiny", messages=HI, tools=[TOOL], stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage.completion_tokens > 0
    calls = [c for chunk in chunks for choice in chunk.choices for c in choice.delta.tool_calls or []]
    assert calls[0].function.name == "weather" and calls[0].id
    assert json.loads("".join(call.function.arguments for call in calls)) == {"city": "Köln"}


def test_openai_stream_helper_puts_the_answer_together(openai_client: Any) -> None:
    with openai_client.chat.completions.stream(model="tiny", messages=HI, tools=[TOOL]) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Hello 0"
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Köln"}


def test_openai_completions_and_models(openai_client: Any) -> None:
    answer = openai_client.completions.create(model="tiny", prompt=["a", "b"], echo=True, logprobs=1, max_tokens=2)
    assert [choice.text for choice in answer.choices] == ["aHe", "bHe"]
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    text = "".join(
        chunk.choices[0].text for chunk in openai_client.completions.create(model="tiny", prompt=[5, 6], stream=True)
    )
    assert text == "Hello 0"
    assert [card.id for card in openai_client.models.list()] == ["tiny"]


def test_openai_responses(openai_client: Any) -> None:
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": False}
    answer = openai_client.responses.create(model="tiny", input="hi", tools=[tool])
    assert answer.output_text == "Hello 0" and answer.output[-1].name == "weather"
    output = {"type": "function_call_output", "call_id": answer.output[-1].call_id, "output": "sun"}
    after = openai_client.responses.create(model="tiny", input=[output], previous_response_id=answer.id, tools=[tool])
    assert after.output_text == "Hello 0" and after.output[-1].type == "message"
    with openai_client.responses.stream(model="tiny", input="hi", tools=[tool]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert final.output_text == "Hello 0" and json.loads(final.output[-1].arguments) == {"city": "Köln"}
    assert openai_client.responses.retrieve(answer.id).id == answer.id
    openai_client.responses.delete(answer.id)


def test_openai_errors_have_their_classes(server: tuple[str, Bench], openai_client: Any) -> None:
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError) as refusal:
        openai_client.chat.completions.create(model="tiny", messages=HI, temperature=-3)
    assert refusal.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        openai_client.chat.completions.create(model="gpt", messages=HI)
    server[1].engine.numbers.waiting = 1000
    with pytest.raises(openai.RateLimitError) as busy:
        openai_client.completions.create(model="tiny", prompt="a")
    server[1].engine.numbers.waiting = 0
    assert int(busy.value.response.headers["retry-after"]) >= 1
    with (
        openai.OpenAI(base_url=f"{server[0]}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_anthropic(server: tuple[str, Bench]) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server[0], api_key="secret", max_retries=0, timeout=30)
    tool = {"name": "weather", "description": "of a city", "input_schema": WEATHER}
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 2000, "messages": HI, "tools": [tool]}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    answer = client.messages.create(**asked)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    assert answer.content[2].input == {"city": "Köln"} and answer.stop_reason == "tool_use"
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Hello 0" and final.content[2].input == {"city": "Köln"}
    assert final.content[0].thinking == "hm" and final.usage.output_tokens == answer.usage.output_tokens
    result = {"type": "tool_result", "tool_use_id": answer.content[2].id, "content": "sun"}
    turns = [*HI, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(**{**asked, "messages": turns})
    assert after.stop_reason == "end_turn" and after.content[-1].text == "Hello 0"
    assert client.messages.count_tokens(model="tiny", messages=HI).input_tokens > 0
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**{**asked, "max_tokens": 10**6})
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**asked, "model": "claude"})
    client.close()


def test_litellm(server: tuple[str, Bench]) -> None:
    litellm = pytest.importorskip("litellm")
    address = server[0]
    common: dict[str, Any] = {"api_base": f"{address}/v1", "api_key": "secret", "num_retries": 0}
    answer = litellm.completion(model="hosted_vllm/tiny", messages=HI, tools=[TOOL], **common)
    message = answer.choices[0].message
    assert message.content == "Hello 0" and message.reasoning_content == "hm"
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Köln"}
    chunks = list(litellm.completion(model="openai/tiny", messages=HI, stream=True, **common))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello 0"
    claude = litellm.completion(
        model="anthropic/tiny", messages=HI, max_tokens=50, api_base=address, api_key="secret", num_retries=0
    )
    assert claude.choices[0].message.content == "Hello 0"
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(model="openai/tiny", messages=HI, temperature=-3, **common)
    litellm.in_memory_llm_clients_cache.flush_cache()
    gc.collect()  # it leaves its sockets open; their warnings belong to this test


def test_schemathesis_finds_nothing(server: tuple[str, Bench], tmp_path: Path) -> None:
    """Requests made from the OpenAPI document: what it says of statuses, media types and errors is true."""
    pytest.importorskip("schemathesis")
    command = [
        sys.executable, "-m", "schemathesis.cli",
        "run", f"{server[0]}/openapi.json", "--no-color",
        "--header", "Authorization: Bearer secret", "--exclude-path-regex", "^/(admin|metrics)",
        "--phases", "coverage,fuzzing", "--max-examples", "5", "--seed", "1", "--checks",
        "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
        "negative_data_rejection,unsupported_method,ignored_auth",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "/v1/chat/completions" in server[1].app.openapi()["paths"]
