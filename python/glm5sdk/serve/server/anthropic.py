"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from glm5sdk.serve.outputs import Delta
from glm5sdk.serve.server.anthropic_fields import CountTokensRequest, MessagesRequest
from glm5sdk.serve.server.anthropic_request import conversation_of
from glm5sdk.serve.server.assistant_text import AssistantText
from glm5sdk.serve.server.conversation import Prepared, prepare
from glm5sdk.serve.server.errors import ApiError, error_event
from glm5sdk.serve.server.generation import Job, PrimedDeltas, collect, deltas, headers_of, primed
from glm5sdk.serve.server.info_routes import answer
from glm5sdk.serve.server.json_body import read_json
from glm5sdk.serve.server.sampling_fields import SamplingFields, checked_priority, sampling_params
from glm5sdk.serve.server.service import Service, new_id
from glm5sdk.serve.server.sse import EventStream, event
from glm5sdk.text.output_events import ContentText, Event, ReasoningText, ToolCallArguments, ToolCallStarted

__all__ = ["count_tokens", "messages"]


async def messages(service: Service, request: Request) -> Response:
    """Answer a conversation, in one piece or as a stream."""
    body = read_json(request, MessagesRequest, service.settings)
    adapter = service.adapter_of(body.model)
    prepared = await prepare(service, conversation_of(body))
    fields = SamplingFields(
        temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, stop=body.stop_sequences, seed=body.seed,
        priority=body.priority,
    )  # fmt: skip
    params = sampling_params(
        fields, service.text.defaults, max_tokens=body.max_tokens, logprobs=None, structured=prepared.structured,
        keep_special=service.text.tags_are_special,
    )  # fmt: skip
    job = Job(prepared.token_ids, params, checked_priority(fields), body.cache_salt or "", adapter)
    message = _Message(service, prepared, new_id("msg_"), body.model or service.model_name)
    if not body.stream:
        return await message.whole(job)
    source = await primed(deltas(service, message.id, [job]))
    return EventStream(
        message.events(source),
        source,
        lambda error: event(error_event(error, anthropic=True), "error"),
        headers_of(source.weight_version, message.id),
        service.settings.request_timeout,
    )


async def count_tokens(service: Service, request: Request) -> Response:
    """How many tokens a prompt has."""
    body = read_json(request, CountTokensRequest, service.settings)
    service.adapter_of(body.model)
    prepared = await prepare(service, conversation_of(body))
    return answer({"input_tokens": len(prepared.token_ids)})


class _Message:
    def __init__(self, service: Service, prepared: Prepared, message_id: str, model: str) -> None:
        self.id = message_id
        self.service = service
        self.prepared = prepared
        self.model = model

    async def whole(self, job: Job) -> Response:
        (output,) = await collect(self.service, self.id, [job])
        one = output.outputs[0]
        text = AssistantText(self.service, self.prepared)
        blocks = _whole_blocks([*text.feed(one.text), *text.finish()])
        reason, stop = _stop(one.finish_reason, one.stop_reason, text.called)
        message = self._message(blocks, output.cached_tokens, len(one.token_ids), one.weight_version)
        message |= {"stop_reason": reason, "stop_sequence": stop}
        return Response(msgspec.json.encode(message), 200, headers_of(one.weight_version, self.id), "application/json")

    async def events(self, source: PrimedDeltas) -> AsyncGenerator[bytes, None]:
        first = source.first[1] if source.first else Delta(self.id)
        start = self._message([], first.cached_tokens, 0, first.weight_version)
        yield event({"type": "message_start", "message": start}, "message_start")
        yield event({"type": "ping"}, "ping")
        text, blocks, made, last = AssistantText(self.service, self.prepared), _Blocks(), 0, first
        async with aclosing(source):
            async for _, last in source:
                made += len(last.token_ids)
                said = text.feed(last.text) + (text.finish() if last.finish_reason else [])
                for payload in blocks.payloads(said):
                    yield event(payload, payload["type"])
        for payload in blocks.end():
            yield event(payload, payload["type"])
        reason, stop = _stop(last.finish_reason, last.stop_reason, text.called)
        end = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop},
            "usage": self._usage(max(first.cached_tokens, last.cached_tokens), made),
            "weight_version": last.weight_version,
        }
        yield event(end, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def _message(self, blocks: list[dict[str, Any]], cached: int, made: int, version: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(cached, made),
            "weight_version": version,
        }

    def _usage(self, cached: int, made: int) -> dict[str, Any]:
        return {
            "input_tokens": len(self.prepared.token_ids) - cached,
            "output_tokens": made,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        }


class _Blocks:
    """Turns events into content blocks that open, grow and close, one at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: str | None = None

    def payloads(self, events: list[Event]) -> Iterator[dict[str, Any]]:
        for said in events:
            match said:
                case ReasoningText(text):
                    yield from self._grow("thinking", {"thinking": "", "signature": ""}, "thinking_delta", "thinking",
                                          text)  # fmt: skip
                case ContentText(text):
                    yield from self._grow("text", {"text": ""}, "text_delta", "text", text)
                case ToolCallStarted(_, name, call):
                    yield from self.end()
                    yield self._open("tool_use", {"id": call, "name": name, "input": {}})
                case ToolCallArguments(_, text):
                    yield self._delta({"type": "input_json_delta", "partial_json": text})

    def end(self) -> Iterator[dict[str, Any]]:
        """Close the block that is open."""
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._kind is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._kind = None

    def _grow(self, kind: str, fresh: dict[str, Any], delta: str, field: str, text: str) -> Iterator[dict[str, Any]]:
        if self._kind != kind:
            yield from self.end()
            yield self._open(kind, fresh)
        yield self._delta({"type": delta, field: text})

    def _open(self, kind: str, fresh: dict[str, Any]) -> dict[str, Any]:
        self._index += 1
        self._kind = kind
        return {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **fresh}}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _whole_blocks(events: list[Event]) -> list[dict[str, Any]]:
    """The blocks of a whole answer: what a client makes of the stream's payloads."""
    blocks: list[dict[str, Any]] = []
    builder, arguments = _Blocks(), ""
    for payload in [*builder.payloads(events), *builder.end()]:
        delta = payload.get("delta", {})
        match payload["type"], delta.get("type"):
            case "content_block_start", _:
                blocks.append(dict(payload["content_block"]))
                arguments = ""
            case "content_block_delta", "thinking_delta":
                blocks[-1]["thinking"] += delta["thinking"]
            case "content_block_delta", "text_delta":
                blocks[-1]["text"] += delta["text"]
            case "content_block_delta", "input_json_delta":
                arguments += delta["partial_json"]
            case "content_block_stop", _ if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = msgspec.Raw(arguments.encode()) if arguments else {}  # JSON already
    return blocks


def _stop(finish: str | None, stop: int | str | None, called: bool) -> tuple[str, str | None]:
    if finish == "abort":
        raise ApiError(503, "the request was aborted before its end", code="aborted")
    if finish == "length":
        return "max_tokens", None
    if isinstance(stop, str):
        return "stop_sequence", stop
    return ("tool_use" if called else "end_turn"), None
