"""Routes that tell and do not generate: models, tokens, health, version, metrics; and /abort."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import glm5sdk
from glm5sdk.core.errors import ContractError
from glm5sdk.serve.server.chat_fields import ChatRequest
from glm5sdk.serve.server.chat_request import conversation_of
from glm5sdk.serve.server.completion_fields import DetokenizeRequest, TokenizeRequest
from glm5sdk.serve.server.errors import ApiError
from glm5sdk.serve.server.json_body import read_json
from glm5sdk.serve.server.service import Service

__all__ = ["AbortRequest", "abort", "detokenize", "health", "metrics", "model", "models", "tokenize", "version"]


class AbortRequest(msgspec.Struct, kw_only=True):
    """Which answer to end, by its `id`."""

    request_id: str


def answer(value: Any, status: int = 200) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def health(service: Service, request: Request) -> Response:
    """200 while new work is taken, else 503."""
    if service.draining:
        raise ApiError(503, "server: draining, takes no new work", code="draining", retry_after=5)
    failure = getattr(service.engine, "failure", None)  # not every engine can fail and live on
    if failure is not None:
        raise ApiError(503, f"engine: it has stopped: {failure}", code="engine_stopped")
    return answer({"status": "ok", "weight_version": service.engine.stats().weight_version})


async def version(service: Service, request: Request) -> Response:
    """The version of this package and of the weights."""
    return answer({"version": glm5sdk.__version__, "weight_version": service.engine.stats().weight_version})


async def metrics(service: Service, request: Request) -> Response:
    """Numbers for Prometheus."""
    return Response(service.metrics.scrape(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def models(service: Service, request: Request) -> Response:
    """The names that requests may use."""
    names = [*service.settings.model_names, *sorted(service.adapters)]
    cards = [_card(service, name) for name in names]
    # Anthropic's clients read has_more, first_id and last_id, OpenAI's read object and data.
    return answer({"object": "list", "data": cards, "has_more": False, "first_id": names[0], "last_id": names[-1]})


async def model(service: Service, request: Request) -> Response:
    """One of them."""
    name = request.path_params["name"]
    service.adapter_of(name)
    return answer(_card(service, name))


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": service.created,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z"),
        "owned_by": "glm5sdk",
        "root": service.settings.root or name,
        "parent": service.model_name if name in service.adapters else None,
        "max_model_len": service.engine.info.max_model_len,
    }


async def tokenize(service: Service, request: Request) -> Response:
    """Text or a conversation to ids."""
    body = read_json(request, TokenizeRequest, service.settings)
    service.adapter_of(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "tokenize: needs either prompt or messages", param="prompt")
    special = body.add_special_tokens
    if body.prompt is not None:
        ids = await service.text.encode(body.prompt, add_special_tokens=special is None or special)
    else:
        chat = ChatRequest(messages=body.messages or [], tools=body.tools)
        talk = conversation_of(chat)
        text = await service.text.render(
            talk.messages,
            talk.tools or None,
            body.chat_template_kwargs or {},
            add_generation_prompt=body.add_generation_prompt is not False,
        )
        ids = await service.text.encode(text, add_special_tokens=bool(special))
    found: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": service.engine.info.max_model_len}
    found["token_strs"] = [service.text.token_text(token) for token in ids] if body.return_token_strs else None
    return answer(found)


async def detokenize(service: Service, request: Request) -> Response:
    """Ids to text."""
    body = read_json(request, DetokenizeRequest, service.settings)
    service.adapter_of(body.model)
    try:
        text = await asyncio.to_thread(service.text.tokenizer.decode, body.tokens, skip_special_tokens=False)
    except ContractError as error:
        raise ApiError(400, str(error), param="tokens") from None
    return answer({"prompt": text})


async def abort(service: Service, request: Request) -> Response:
    """End an answer that is being made; an unknown id ends nothing."""
    body = read_json(request, AbortRequest, service.settings)
    names = service.alive.get(body.request_id, ())
    for name in names:
        await service.engine.abort(name)
    return answer({"request_id": body.request_id, "aborted": len(names)})
