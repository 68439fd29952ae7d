"""Cached prefixes between servers, for the router: pin and describe, read, take in, renew, release.

The router talks to both sides; the pages go straight from one server to the other, which pulls them. All of it stands
under /admin: whoever holds that key is trusted with what the pages make the model say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from glm5sdk.core.errors import UnavailableError
from glm5sdk.serve.params import SamplingParams
from glm5sdk.serve.router.replicas import replica_url
from glm5sdk.serve.server import anthropic_request, chat_request, responses_request
from glm5sdk.serve.server.anthropic_fields import MessagesRequest
from glm5sdk.serve.server.chat_fields import ChatRequest
from glm5sdk.serve.server.completion_fields import CompletionRequest, prompts_of
from glm5sdk.serve.server.conversation import prepare
from glm5sdk.serve.server.errors import ApiError
from glm5sdk.serve.server.generation import Job, collect
from glm5sdk.serve.server.json_body import parse_json, read_json
from glm5sdk.serve.server.responses_fields import ResponsesRequest
from glm5sdk.serve.server.service import Service, new_id
from glm5sdk.serve.transfer import Packer, Part, Prefix, Receiver, Refused

__all__ = ["ExportRequest", "ImportRequest", "LeaseRequest", "kv_export", "kv_import", "kv_pages", "kv_release",
           "kv_renew"]  # fmt: skip

PIECE_BYTES = 4 << 20
PULL_SECONDS = 60.0


class ExportRequest(msgspec.Struct, kw_only=True):
    """Whose prefix: either tokens, or a request as it came to `path`."""

    path: str | None = None
    request: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    cache_salt: str = ""
    prefill: bool = False
    seconds: float = 30.0


class ImportRequest(msgspec.Struct, kw_only=True):
    """Where the pages are."""

    source: str
    lease_id: str


class LeaseRequest(msgspec.Struct, kw_only=True):
    """A lease; `seconds` is how long it shall last from now."""

    lease_id: str
    seconds: float = 30.0


async def kv_export(service: Service, request: Request) -> Response:
    """Pin what the cache has of a prompt; with `prefill`, compute the prompt first."""
    body = read_json(request, ExportRequest, service.settings)
    ids, salt = await _prompt(service, body)
    if body.prefill:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        await collect(service, new_id("prefill-"), [Job(ids, params, cache_salt=salt)])
    found = await _export(service, {"token_ids": ids, "cache_salt": salt, "seconds": body.seconds})
    lease = found["lease_id"]
    if lease is None:
        return _answer({"lease_id": None, "rows": 0, "prompt_tokens": len(ids), "bytes": 0})
    parts = {"pages": Part("uint8", (found["num_pages"], found["geometry"]["page_bytes"]))}
    prefix = Prefix(found["tokens"], found["rows"], found["weight_version"], found["geometry"], parts, salt)
    now = time.monotonic()
    _forget_ended(service, now)
    service.exports[lease] = prefix, now + body.seconds
    return _answer({"lease_id": lease, "rows": found["rows"], "prompt_tokens": len(ids),
                    "bytes": parts["pages"].size, "weight_version": found["weight_version"]})  # fmt: skip


async def kv_pages(service: Service, request: Request) -> Response:
    """The prefix of a lease in its wire format."""
    lease = request.path_params["lease_id"]
    if lease not in service.exports:
        raise ApiError(404, "lease: there is none of this name, needs one that lasts", code="lease_not_found")
    prefix, _ = service.exports[lease]
    packer = Packer(prefix)
    count, page_bytes = prefix.parts["pages"].shape
    step = max(1, PIECE_BYTES // max(1, page_bytes))

    async def read(first: int) -> bytes:
        arguments = {"lease_id": lease, "first": first, "count": min(step, count - first)}
        return await service.engine.control("read_lease", arguments)

    begin = await read(0)  # a lease that has ended is a status, not half an answer

    async def pieces() -> AsyncIterator[bytes]:
        yield packer.front()
        yield bytes(packer.piece(begin))
        for first in range(step, count, step):
            # A lease that ends now breaks the answer off, which the other side sees by its length and its checksum.
            yield bytes(packer.piece(await read(first)))
        yield packer.end()

    headers = {"content-length": str(packer.total)}
    return StreamingResponse(pieces(), headers=headers, media_type="application/octet-stream")


async def kv_import(service: Service, request: Request) -> Response:
    """Pull a prefix from another server into the cache here."""
    body = read_json(request, ImportRequest, service.settings)
    if not body.lease_id.isalnum():
        raise ApiError(400, "lease_id: holds other characters, needs letters and digits", param="lease_id")
    source = replica_url(body.source)
    # What an export of nothing says of this engine is what the other one must say as well.
    mine = await service.engine.control("export_prefix", {"token_ids": []})
    prefix = await _pull(service, f"{source}/admin/kv/pages/{body.lease_id}", mine)
    pages = prefix.parts.get("pages")
    if pages is None or len(prefix.parts) != 1 or pages.dtype != "uint8":
        raise Refused(f"prefix transfer: parts are {sorted(prefix.parts)}, needs pages of uint8")
    rows = await service.engine.control(
        "import_prefix",
        {
            "tokens": list(prefix.token_ids), "rows": prefix.rows, "weight_version": prefix.weight_version,
            "geometry": dict(prefix.geometry), "pages": bytes(pages.data), "cache_salt": prefix.salt,
        },
    )  # fmt: skip
    return _answer({"rows": rows})


async def kv_renew(service: Service, request: Request) -> Response:
    """Let a lease last longer."""
    body = read_json(request, LeaseRequest, service.settings)
    arguments = {"lease_id": body.lease_id, "seconds": body.seconds}
    renewed = await service.engine.control("renew_lease", arguments)
    if renewed and body.lease_id in service.exports:
        service.exports[body.lease_id] = service.exports[body.lease_id][0], time.monotonic() + body.seconds
    return _answer({"renewed": renewed})


async def kv_release(service: Service, request: Request) -> Response:
    """End a lease; one that has ended is no error, as messages may come twice."""
    body = read_json(request, LeaseRequest, service.settings)
    service.exports.pop(body.lease_id, None)
    return _answer({"released": await service.engine.control("release_lease", {"lease_id": body.lease_id})})


async def _export(service: Service, arguments: dict[str, Any]) -> dict[str, Any]:
    """The engine's export; one that nobody waits for any more is released as soon as it is there."""
    export = asyncio.ensure_future(service.engine.control("export_prefix", arguments))
    try:
        return await asyncio.shield(export)
    except asyncio.CancelledError:
        lease = (await export)["lease_id"]
        if lease is not None:
            await service.engine.control("release_lease", {"lease_id": lease})
        raise


async def _prompt(service: Service, body: ExportRequest) -> tuple[list[int], str]:
    if body.token_ids is not None:
        return body.token_ids, body.cache_salt
    coded, depth = msgspec.json.encode(body.request or {}), service.settings.max_json_depth
    talk, model, salt = None, None, ""
    if body.path == "/v1/completions":
        completion = parse_json(coded, CompletionRequest, depth)
        _need_plain_model(service, completion.model)
        prompts = await prompts_of(completion, service.text)
        if len(prompts) != 1:
            raise ApiError(400, f"prompt: holds {len(prompts)} prompts, needs one to move it", param="prompt")
        return prompts[0][1], completion.cache_salt or ""
    if body.path == "/v1/chat/completions":
        chat = parse_json(coded, ChatRequest, depth)
        talk, model, salt = chat_request.conversation_of(chat), chat.model, chat.cache_salt or ""
    elif body.path == "/v1/messages":
        messages = parse_json(coded, MessagesRequest, depth)
        talk, model, salt = anthropic_request.conversation_of(messages), messages.model, messages.cache_salt or ""
    elif body.path == "/v1/responses":
        asked = parse_json(coded, ResponsesRequest, depth)
        if asked.previous_response_id is not None:
            raise ApiError(400, "previous_response_id: is given, needs a prompt that is whole", param="request")
        talk = responses_request.conversation_of(asked, responses_request.messages_of(asked))
        model, salt = asked.model, asked.cache_salt or ""
    if talk is None:
        raise ApiError(400, f"path: is {body.path!r}, needs a route that answers prompts, or token_ids", param="path")
    _need_plain_model(service, model)
    return (await prepare(service, talk)).token_ids, salt


def _need_plain_model(service: Service, model: str | None) -> None:
    if service.adapter_of(model) is not None:
        raise ApiError(400, "model: is an adapter, needs the plain model to move a prefix", param="model")


async def _pull(service: Service, url: str, mine: dict[str, Any]) -> Prefix:
    try:
        import httpx
    except ImportError as error:
        raise UnavailableError('server: httpx is missing; pip install "glm5sdk[serve]"') from error
    info = service.engine.info
    receiver = Receiver(info.num_pages * mine["geometry"]["page_bytes"] + 4 * (info.max_model_len + 64))
    headers = {"authorization": f"Bearer {service.settings.admin_key}"}
    try:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=PULL_SECONDS) as client,
            client.stream("GET", url, headers=headers) as answer,
        ):
            if answer.status_code != 200:
                raise ApiError(502, f"source: answers {answer.status_code}, needs 200", code="source_failed")
            checked = False
            async for piece in answer.aiter_raw():
                receiver.feed(piece)
                if receiver.heading is not None and not checked:
                    checked = True
                    said = receiver.heading
                    if said.weight_version != mine["weight_version"] or said.geometry != mine["geometry"]:
                        raise Refused(
                            f"prefix transfer: weights and geometry are {said.weight_version!r} and {said.geometry}, "
                            f"needs {mine['weight_version']!r} and {mine['geometry']}"
                        )
    except httpx.HTTPError as error:
        raise ApiError(502, f"source: {type(error).__name__}: {error}", code="source_failed") from error
    return receiver.finish()


def _forget_ended(service: Service, now: float) -> None:
    for lease in [lease for lease, (_, end) in service.exports.items() if end < now]:
        del service.exports[lease]


def _answer(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
