"""An engine that says what it is told, a model's text side, and a client in front of both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cache
from typing import Any

import httpx
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from glm5sdk.core.errors import ContractError
from glm5sdk.serve.interface import EngineInfo, EngineStats, OverloadedError
from glm5sdk.serve.outputs import Delta, TokenLogprob
from glm5sdk.serve.params import SamplingParams
from glm5sdk.serve.server import ServerSettings, create_app
from glm5sdk.serve.server.model_text import DEFAULT_TEMPLATE, ModelText
from glm5sdk.text.chat import ChatTemplate
from glm5sdk.text.tokenizer import Tokenizer

ROLES = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]


def make_tokenizer() -> Tokenizer:
    """Bytes, GLM's special tokens and its tags."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ROLES])
    backend.add_tokens([AddedToken(token, normalized=False) for token in TAGS])
    return Tokenizer(backend)


@cache  # a template's process takes a while to start
def make_text(template: str | None = None) -> ModelText:
    """The text side with the built-in template, or another."""
    return ModelText(make_tokenizer(), ChatTemplate(template or DEFAULT_TEMPLATE.read_text()))


def fake_logprob(token: int, top: int) -> TokenLogprob:
    """A number that tells its token."""
    best = tuple((other, -0.25 - rank) for rank, other in enumerate(range(100, 100 + top)))
    return TokenLogprob(token, -1.0 - token / 1000, best)


class FakeEngine:
    """Generates `say(prompt text, index)` token by token, `pace` tokens a delta.

    Attributes:
        requests: (token ids, params, keywords) of every request.
        aborted: names of requests that ended before their end.
        gate: deltas behind the first wait for it.
        held: even the first one waits.
        fail: raised instead of generating.
        broken: the error that the second delta reports.
    """

    def __init__(self, tokenizer: Tokenizer, say: Callable[[str, int], str], pace: int = 1) -> None:
        self.tokenizer, self.say, self.pace = tokenizer, say, pace
        self.info = EngineInfo(4096, 512, 16, 64, tokenizer.stop_ids, 4, "cpu", "float32", "float32")
        self.numbers = EngineStats(pages_total=64, pages_free=48, weight_version="w1")
        self.requests: list[tuple[list[int], SamplingParams, dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.controls: list[tuple[str, dict[str, Any]]] = []
        self.gate: asyncio.Event | None = None
        self.held = False
        self.fail: Exception | None = None
        self.broken: str | None = None

    async def generate(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, *, request_id: str, **others: Any
    ) -> AsyncIterator[Delta]:
        self.requests.append((list(prompt_token_ids), params, {"request_id": request_id, **others}))
        if self.fail is not None:
            raise self.fail
        prompt = self.tokenizer.decode(prompt_token_ids, skip_special_tokens=False)
        done = False
        try:
            if self.held and self.gate is not None:
                await self.gate.wait()
            for index in range(params.n):
                async for delta in self._sequence(request_id, prompt_token_ids, params, index, self.say(prompt, index)):
                    yield delta
            done = True
        finally:
            if not done:
                self.aborted.append(request_id)

    async def _sequence(
        self, name: str, prompt: Sequence[int], params: SamplingParams, index: int, text: str
    ) -> AsyncIterator[Delta]:
        ids = self.tokenizer.encode(text)
        limit = params.max_tokens or 10**6
        reason = "length" if len(ids) >= limit else "stop"
        ids = ids[:limit] if reason == "length" else [*ids, self.info.stop_token_ids[0]]
        stream = self.tokenizer.stream(skip_special_tokens=params.skip_special_tokens)
        for start in range(0, len(ids), self.pace):
            if start and self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
            piece, last = ids[start : start + self.pace], start + self.pace >= len(ids)
            delta = Delta(name, index, piece, stream.push(piece), prompt_tokens=len(prompt), cached_tokens=1,
                          weight_version=self.numbers.weight_version, seed=(params.seed or 7) + index)  # fmt: skip
            if start and self.broken:
                delta.finish_reason, delta.error = "error", self.broken
            elif last:
                delta.text += stream.finish()
                delta.finish_reason = reason
            if params.logprobs is not None:
                delta.logprobs = [fake_logprob(token, params.logprobs) for token in piece]
            if params.prompt_logprobs is not None and not start and not index:
                top = params.prompt_logprobs
                delta.prompt_logprobs = [None, *(fake_logprob(token, top) for token in prompt[1:])]
            yield delta

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def stats(self) -> EngineStats:
        return self.numbers

    async def control(self, command: str, arguments: Mapping[str, Any]) -> Any:
        self.controls.append((command, dict(arguments)))
        if command == "unknown":
            raise ContractError("control: command is 'unknown', needs another")
        return {"done": command}


class Bench:
    """A server over a fake engine, called in this process."""

    def __init__(
        self, say: str | Callable[[str, int], str] = "Hello wörld", *, pace: int = 1, template: str | None = None,
        **settings: Any,
    ) -> None:  # fmt: skip
        text = make_text(template)
        self.engine = FakeEngine(text.tokenizer, say if callable(say) else lambda prompt, index: say, pace)
        self.app = create_app(self.engine, ServerSettings(**{"model_names": ("tiny",), **settings}), text)
        self.service = self.app.state.service
        self.text = text

    def client(self, **headers: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        async def call() -> httpx.Response:
            async with self.client(**headers) as client:
                if isinstance(body, bytes):
                    return await client.post(path, content=body)
                return await client.post(path, json=body)

        return asyncio.run(call())

    def get(self, path: str, **headers: str) -> httpx.Response:
        async def call() -> httpx.Response:
            async with self.client(**headers) as client:
                return await client.get(path)

        return asyncio.run(call())

    def chat(self, text: str = "hi", **more: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more})


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The payloads of a stream that ends with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


__all__ = ["Bench", "FakeEngine", "OverloadedError", "events_of", "fake_logprob", "make_text", "make_tokenizer"]
