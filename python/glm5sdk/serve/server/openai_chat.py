"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from glm5sdk.serve.outputs import CompletionOutput, Delta
from glm5sdk.serve.server.assistant_text import AssistantText, parsed
from glm5sdk.serve.server.chat_fields import ChatRequest
from glm5sdk.serve.server.chat_request import conversation_of
from glm5sdk.serve.server.conversation import Prepared, prepare
from glm5sdk.serve.server.errors import ApiError, error_event
from glm5sdk.serve.server.generation import Job, PrimedDeltas, collect, deltas, headers_of, primed, usage_of
from glm5sdk.serve.server.json_body import read_json
from glm5sdk.serve.server.logprob_forms import chat_logprobs, prompt_logprobs_form
from glm5sdk.serve.server.sampling_fields import MAX_LOGPROBS, checked_id, checked_priority, sampling_params
from glm5sdk.serve.server.service import Service
from glm5sdk.serve.server.sse import DONE, EventStream, event
from glm5sdk.text.output_events import (
    ContentText,
    Event,
    ReasoningText,
    ToolCallArguments,
    ToolCallStarted,
)

__all__ = ["chat_completions"]


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer a conversation, in one piece or as a stream."""
    body = read_json(request, ChatRequest, service.settings)
    adapter = service.adapter_of(body.model)
    prepared = await prepare(service, conversation_of(body))
    params = sampling_params(
        body,
        service.text.defaults,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=_logprobs(body),
        structured=prepared.structured,
        keep_special=service.text.tags_are_special,
    )
    job = Job(prepared.token_ids, params, checked_priority(body), body.cache_salt or "", adapter)
    answer = _Answer(service, body, prepared, checked_id(body, "chatcmpl-"))
    if not body.stream:
        return await answer.whole(job)
    source = await primed(deltas(service, answer.id, [job]))
    return EventStream(
        answer.events(source),
        source,
        lambda error: event(error_event(error)) + DONE,
        headers_of(source.weight_version, answer.id),
        service.settings.request_timeout,
    )


class _Answer:
    def __init__(self, service: Service, body: ChatRequest, prepared: Prepared, answer_id: str) -> None:
        self.id = answer_id
        self.service = service
        self.body = body
        self.prepared = prepared
        self.reasons = body.include_reasoning is not False
        self.head: dict[str, Any] = {
            "id": answer_id,
            "created": int(time.time()),
            "model": body.model or service.model_name,
            "system_fingerprint": None,
        }

    async def whole(self, job: Job) -> Response:
        (output,) = await collect(self.service, self.id, [job])
        made = sum(len(one.token_ids) for one in output.outputs)
        version = output.outputs[0].weight_version
        answer = {
            **self.head,
            "object": "chat.completion",
            "choices": [self._choice(one) for one in output.outputs],
            "usage": usage_of(len(job.prompt_token_ids), output.cached_tokens, made),
            "weight_version": version,
        }
        if output.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs_form(output.prompt_logprobs, self.service.text)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = job.prompt_token_ids
        return Response(msgspec.json.encode(answer), 200, headers_of(version, self.id), "application/json")

    def _choice(self, one: CompletionOutput) -> dict[str, Any]:
        said = parsed(self.service, self.prepared, one.text)
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.reasoning and self.reasons:
            message["reasoning_content"] = said.reasoning
        if said.tool_calls:
            message["content"] = said.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in said.tool_calls
            ]
        choice = {
            "index": one.index,
            "message": message,
            "logprobs": None if one.logprobs is None else chat_logprobs(one.logprobs, self.service.text),
            "finish_reason": _reason(one.finish_reason, bool(said.tool_calls)),
            "stop_reason": one.stop_reason,
            "weight_version": one.weight_version,
            "seed": one.seed,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = one.token_ids
        return choice

    async def events(self, source: PrimedDeltas) -> AsyncGenerator[bytes, None]:
        n = self.body.n or 1
        options = self.body.stream_options
        with_usage = bool(options and options.include_usage)
        each_usage = bool(options and options.continuous_usage_stats)
        texts = [AssistantText(self.service, self.prepared) for _ in range(n)]
        opened = [False] * n
        made = cached = 0
        version = ""
        async with aclosing(source):
            async for _, delta in source:
                made += len(delta.token_ids)
                cached = max(cached, delta.cached_tokens)
                version = delta.weight_version
                usage = usage_of(len(self.prepared.token_ids), cached, made) if each_usage else None
                if not opened[delta.index]:
                    opened[delta.index] = True
                    first = {"role": "assistant", "content": ""}
                    extra = {"prompt_token_ids": self.prepared.token_ids} if self.body.return_token_ids else {}
                    yield self._chunk([_step(delta.index, first)], version, with_usage, usage, extra)
                for choice in self._steps(texts[delta.index], delta):
                    yield self._chunk([choice], version, with_usage, usage)
        if with_usage:
            usage = usage_of(len(self.prepared.token_ids), cached, made)
            yield self._chunk([], version, True, usage)
        yield DONE

    def _steps(self, text: AssistantText, delta: Delta) -> list[dict[str, Any]]:
        """The choices that one delta makes; its log-probabilities and token ids go with the first of them."""
        events = text.feed(delta.text) + (text.finish() if delta.finish_reason else [])
        steps = [_step(delta.index, said) for said in map(self._said, events) if said]
        beside: dict[str, Any] = {}
        if delta.logprobs:
            beside["logprobs"] = chat_logprobs(delta.logprobs, self.service.text)
        if self.body.return_token_ids and delta.token_ids:
            beside["token_ids"] = delta.token_ids
        if delta.finish_reason is not None:
            last = _step(delta.index, {})
            last["finish_reason"] = _reason(delta.finish_reason, text.called)
            last["stop_reason"] = delta.stop_reason
            last["seed"] = delta.seed
            steps.append(last)
        if beside and not steps:
            steps.append(_step(delta.index, {}))
        if beside:
            steps[0].update(beside)
        return steps

    def _said(self, said: Event) -> dict[str, Any] | None:
        match said:
            case ContentText(text):
                return {"content": text}
            case ReasoningText(text):
                return {"reasoning_content": text} if self.reasons else None
            case ToolCallStarted(index, name, call):
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": call, "type": "function", "function": function}]}
            case ToolCallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        return None

    def _chunk(
        self,
        choices: list[dict[str, Any]],
        version: str,
        with_usage: bool,
        usage: dict[str, Any] | None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        chunk = {
            **self.head,
            "object": "chat.completion.chunk",
            "choices": choices,
            "weight_version": version,
            **(extra or {}),
        }
        if with_usage or usage:
            chunk["usage"] = usage
        return event(chunk)


def _step(index: int, said: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": said, "logprobs": None, "finish_reason": None}


def _reason(reason: str | None, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason


def _logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: is given without logprobs, needs logprobs true", param="top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise ApiError(400, f"top_logprobs: is {body.top_logprobs}, needs 0 to {MAX_LOGPROBS}", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None
