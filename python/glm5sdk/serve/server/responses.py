"""POST /v1/responses, and reading or deleting a kept answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from glm5sdk.serve.outputs import Delta
from glm5sdk.serve.server.assistant_text import AssistantText
from glm5sdk.serve.server.conversation import Conversation, Prepared, arguments_of, prepare
from glm5sdk.serve.server.errors import ApiError, as_api_error
from glm5sdk.serve.server.generation import Job, PrimedDeltas, collect, deltas, headers_of, primed
from glm5sdk.serve.server.info_routes import answer
from glm5sdk.serve.server.json_body import read_json
from glm5sdk.serve.server.responses_fields import ResponsesRequest
from glm5sdk.serve.server.responses_items import OutputItems
from glm5sdk.serve.server.responses_request import conversation_of, messages_of
from glm5sdk.serve.server.sampling_fields import SamplingFields, checked_priority, sampling_params
from glm5sdk.serve.server.service import Service, new_id
from glm5sdk.serve.server.sse import EventStream, event

__all__ = ["delete_response", "get_response", "list_input_items", "responses"]


async def responses(service: Service, request: Request) -> Response:
    """Answer an input, in one piece or as a stream."""
    body = read_json(request, ResponsesRequest, service.settings)
    adapter = service.adapter_of(body.model)
    earlier: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        earlier = _kept(service, body.previous_response_id, "previous_response_id").messages
    talk = conversation_of(body, [*earlier, *messages_of(body)])
    prepared = await prepare(service, talk)
    fields = SamplingFields(
        temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, min_p=body.min_p, seed=body.seed,
        stop=body.stop, priority=body.priority,
    )  # fmt: skip
    params = sampling_params(
        fields, service.text.defaults, max_tokens=body.max_output_tokens, logprobs=None,
        structured=prepared.structured, keep_special=service.text.tags_are_special,
    )  # fmt: skip
    job = Job(prepared.token_ids, params, checked_priority(fields), body.cache_salt or "", adapter)
    made = _Made(service, body, talk, prepared, job)
    if not body.stream:
        (output,) = await collect(service, made.id, [job])
        one = output.outputs[0]
        made.take(Delta(made.id, 0, one.token_ids, one.text, finish_reason=one.finish_reason,
                        cached_tokens=output.cached_tokens, weight_version=one.weight_version))  # fmt: skip
        content = msgspec.json.encode(made.finished())
        return Response(content, 200, headers_of(one.weight_version, made.id), "application/json")
    source = await primed(deltas(service, made.id, [job]))
    return EventStream(
        made.events(source),
        source,
        made.failure_event,
        headers_of(source.weight_version, made.id),
        service.settings.request_timeout,
    )


async def get_response(service: Service, request: Request) -> Response:
    """A kept answer."""
    return answer(_kept(service, request.path_params["response_id"], "response_id", 404).response)


async def list_input_items(service: Service, request: Request) -> Response:
    """What came with the request of a kept answer."""
    items = _kept(service, request.path_params["response_id"], "response_id", 404).input_items
    return answer({"object": "list", "data": items, "has_more": False, "first_id": None, "last_id": None})


async def delete_response(service: Service, request: Request) -> Response:
    """Forget a kept answer."""
    name = request.path_params["response_id"]
    _kept(service, name, "response_id", 404)
    service.responses.remove(name)
    return answer({"id": name, "object": "response", "deleted": True})


def _kept(service: Service, name: str, param: str, status: int = 400) -> Any:
    stored = service.responses.get(name)
    if stored is None:
        raise ApiError(status, f"{param}: {name[:80]!r} is not kept here, needs the id of a stored response that is "
                       "not too old", param=param, code="response_not_found")  # fmt: skip
    return stored


class _Made:
    """One answer in the making."""

    def __init__(
        self, service: Service, body: ResponsesRequest, talk: Conversation, prepared: Prepared, job: Job
    ) -> None:
        self.id = new_id("resp_")
        self.service, self.body, self.talk, self.prepared, self.job = service, body, talk, prepared, job
        self.text = AssistantText(service, prepared)
        self.items = OutputItems()
        self.created = int(time.time())
        self.tokens = self.cached = self.sequence = 0
        self.version = ""
        self.finish: str | None = None

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        """One delta's payloads."""
        self.tokens += len(delta.token_ids)
        self.cached = max(self.cached, delta.cached_tokens)
        self.version = delta.weight_version
        self.finish = delta.finish_reason or self.finish
        said = self.text.feed(delta.text) + (self.text.finish() if delta.finish_reason else [])
        found = list(self.items.payloads(said))
        if delta.finish_reason:
            found += self.items.end("completed" if self.finish == "stop" else "incomplete")
        return found

    async def events(self, source: PrimedDeltas) -> AsyncGenerator[bytes, None]:
        self.version = source.weight_version
        for kind in ("created", "in_progress"):
            yield self._event({"type": f"response.{kind}", "response": self._object("in_progress")})
        try:
            async with aclosing(source):
                async for _, delta in source:
                    for payload in self.take(delta):
                        yield self._event(payload)
        except Exception as error:  # noqa: BLE001  the protocol has an event for it
            yield self.failure_event(as_api_error(error))
            return
        final = self.finished()
        yield self._event({"type": f"response.{final['status']}", "response": final})

    def failure_event(self, error: ApiError) -> bytes:
        """The stream's last words when it breaks off."""
        failed = self._object("failed", {"code": error.code or "server_error", "message": error.message})
        return self._event({"type": "response.failed", "response": failed})

    def finished(self) -> dict[str, Any]:
        """The whole answer, kept if the request wants that."""
        if self.finish == "abort":
            return self._object("failed", {"code": "aborted", "message": "the request was aborted before its end"})
        final = self._object("incomplete" if self.finish == "length" else "completed")
        if self.body.store is not False:
            said = self.items.message()
            calls = [item for item in self.items.items if item["type"] == "function_call"]
            if calls:
                said["tool_calls"] = [
                    {
                        "id": call["call_id"],
                        "type": "function",
                        "function": {
                            "name": call["name"], "arguments": arguments_of(call["arguments"], "output.arguments"),
                        },
                    }
                    for call in calls
                ]  # fmt: skip
            # Instructions are of one request only.
            talk = self.talk.messages[1:] if self.body.instructions else self.talk.messages
            given = self.body.input
            items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
            self.service.responses.put(final, [*talk, said], items)
        return final

    def _event(self, payload: dict[str, Any]) -> bytes:
        numbered = {**payload, "sequence_number": self.sequence}
        self.sequence += 1
        return event(numbered, payload["type"])

    def _object(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        body, params = self.body, self.job.params
        done = status != "in_progress"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if done else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model or self.service.model_name,
            "output": self.items.items if done else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": msgspec.to_builtins(body.reasoning) if body.reasoning else {"effort": None, "summary": None},
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": msgspec.to_builtins(body.text) if body.text else {"format": {"type": "text"}},
            "tool_choice": msgspec.to_builtins(body.tool_choice) or "auto",
            "tools": msgspec.to_builtins(body.tools) or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if done else None,
            "user": body.user,
            "metadata": body.metadata or {},
            "weight_version": self.version,
        }

    def _usage(self) -> dict[str, Any]:
        prompt = len(self.prepared.token_ids)
        thought = "".join(item["content"][0]["text"] for item in self.items.items if item["type"] == "reasoning")
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.tokens,
            "output_tokens_details": {"reasoning_tokens": len(self.service.text.tokenizer.encode(thought))},
            "total_tokens": prompt + self.tokens,
        }
