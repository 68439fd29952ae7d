"""Routes of the administrator: thin calls of the engine's commands, and draining."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.serve.server.errors import ApiError
from glm5sdk.serve.server.info_routes import answer
from glm5sdk.serve.server.json_body import read_json
from glm5sdk.serve.server.service import Service

__all__ = [
    "AdapterName", "AdapterSource", "Arguments", "Command", "DrainRequest", "control", "drain", "load_adapter",
    "pause", "resume", "show_stats", "swap_experts", "unload_adapter", "update_weights",
]  # fmt: skip

Arguments = dict[str, Any]


class AdapterSource(msgspec.Struct, kw_only=True):
    """An adapter to load."""

    name: str
    path: str


class AdapterName(msgspec.Struct, kw_only=True):
    """An adapter to forget."""

    name: str


class Command(msgspec.Struct, kw_only=True):
    """Any of the engine's commands."""

    command: str
    arguments: dict[str, Any] = {}


class DrainRequest(msgspec.Struct, kw_only=True):
    """Whether to refuse new work, and how long to wait until the running is done."""

    draining: bool = True
    seconds: float = 0.0


async def pause(service: Service, request: Request) -> Response:
    """Begin no more steps; requests stay where they are."""
    return await _run(service, "pause", _optional(service, request, Arguments))


async def resume(service: Service, request: Request) -> Response:
    """Go on after a pause."""
    return await _run(service, "resume", _optional(service, request, Arguments))


async def update_weights(service: Service, request: Request) -> Response:
    """Give new requests other weights."""
    return await _run(service, "update_weights", read_json(request, Arguments, service.settings))


async def swap_experts(service: Service, request: Request) -> Response:
    """Give new requests other experts."""
    return await _run(service, "swap_experts", read_json(request, Arguments, service.settings))


async def load_adapter(service: Service, request: Request) -> Response:
    """Load an adapter; requests then use its name as their model."""
    body = read_json(request, AdapterSource, service.settings)
    if not body.name or body.name in service.settings.model_names:
        raise ApiError(400, f"name: is {body.name!r}, needs one that no model has", param="name")
    response = await _run(service, "load_adapter", {"name": body.name, "path": body.path})
    service.adapters.add(body.name)
    return response


async def unload_adapter(service: Service, request: Request) -> Response:
    """Forget an adapter: first for new requests, then in the engine."""
    body = read_json(request, AdapterName, service.settings)
    if body.name not in service.adapters:
        raise ApiError(404, f"name: {body.name!r} is not loaded", param="name", code="adapter_not_found")
    service.adapters.discard(body.name)
    try:
        return await _run(service, "unload_adapter", {"name": body.name})
    except BaseException:
        service.adapters.add(body.name)
        raise


async def control(service: Service, request: Request) -> Response:
    """Run any of the engine's commands whose result is JSON."""
    body = read_json(request, Command, service.settings)
    return await _run(service, body.command, body.arguments)


async def drain(service: Service, request: Request) -> Response:
    """Refuse new work from now on (or no longer), and wait for what runs."""
    body = _optional(service, request, DrainRequest)
    service.draining = body.draining
    end = time.monotonic() + min(max(body.seconds, 0.0), service.settings.request_timeout)
    while service.draining and service.in_flight > 1 and time.monotonic() < end:  # this request is one
        await asyncio.sleep(0.02)
    return answer({"draining": service.draining, "in_flight": service.in_flight - 1})


async def show_stats(service: Service, request: Request) -> Response:
    """The engine's numbers and facts."""
    return answer({"info": asdict(service.engine.info), "stats": asdict(service.engine.stats())})


async def _run(service: Service, command: str, arguments: dict[str, Any]) -> Response:
    try:
        result = await service.engine.control(command, arguments)
    except CheckpointError as error:  # a path that the administrator gave; the old weights go on
        raise ApiError(400, str(error), code="bad_checkpoint") from None
    version = service.engine.stats().weight_version
    try:
        return answer({"command": command, "result": result, "weight_version": version})
    except TypeError:  # tensors of a prefix, for example
        raise ContractError(f"control: result of {command!r} is no JSON, needs a caller in the process") from None


def _optional(service: Service, request: Request, kind: Any) -> Any:
    return read_json(request, kind, service.settings) if request.state.body else kind()
