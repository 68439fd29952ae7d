"""Admin routes of the router: who is in the fleet, who drains, and commands that every replica is to get."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from glm5sdk.core.errors import ContractError, UnavailableError
from glm5sdk.serve.router.errors import RouteError
from glm5sdk.serve.router.keys import need_admin
from glm5sdk.serve.router.replicas import Replica

__all__ = ["admin_routes", "fan_out", "json_answer"]

POLL = 0.05
LOSES_CACHE = ("update_weights", "swap_experts")


def json_answer(content: Any, status: int = 200) -> Any:
    """A JSON response of Starlette's."""
    import msgspec
    from starlette.responses import Response

    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def fan_out(
    client: Any, replicas: list[Replica], method: str, target: str, headers: dict[str, str], body: bytes
) -> dict[str, dict[str, Any]]:
    """Send one request to every replica at the same time.

    Returns:
        URL -> {"status", "body"}, or {"error"} for one that did not answer.
    """
    import httpx
    import msgspec

    async def one(replica: Replica) -> dict[str, Any]:
        try:
            answer = await client.request(method, replica.url + target, headers=headers, content=body)
        except httpx.HTTPError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        try:
            said = msgspec.json.decode(answer.content) if answer.content else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            said = answer.text
        return {"status": answer.status_code, "body": said}

    answers = await asyncio.gather(*(one(r) for r in replicas))
    return {replica.url: answer for replica, answer in zip(replicas, answers, strict=True)}


def admin_routes(router: Any) -> list[Any]:
    """Starlette routes under /admin; `router` is a `Router`."""
    from starlette.requests import Request
    from starlette.routing import Route

    def guarded(serve: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        async def checked(request: Request) -> Any:
            need_admin(request.headers, router.settings.admin_key)
            return await serve(request)

        return checked

    async def show(request: Request) -> Any:
        prefill = [_describe(r) for r in router.prefill_fleet]
        return json_answer({"replicas": [_describe(r) for r in router.fleet], "prefill": prefill})

    async def add(request: Request) -> Any:
        replica = router.add_replica(_field(await _body(request), "replica", str))
        return json_answer(_describe(replica), 201)

    async def remove(request: Request) -> Any:
        replica = await router.remove_replica(_field(await _body(request), "replica", str))
        return json_answer(_describe(replica))

    async def drain(request: Request) -> Any:
        body = await _body(request)
        replica = router.fleet.need(_field(body, "replica", str))
        wait = float(_field(body, "wait", (int, float), 0.0))
        replica.draining = True
        end = asyncio.get_running_loop().time() + min(max(wait, 0.0), 3600.0)
        while replica.in_flight and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(POLL)
        return json_answer({**_describe(replica), "drained": replica.in_flight == 0})

    async def undrain(request: Request) -> Any:
        replica = router.fleet.need(_field(await _body(request), "replica", str))
        replica.draining = False
        return json_answer(_describe(replica))

    async def forward(request: Request) -> Any:
        headers = {"authorization": f"Bearer {router.settings.admin_key}", "content-type": "application/json"}
        target = f"/admin/{request.path_params['command']}"
        body = await _raw(request, router.settings.max_body_bytes)
        everyone = [*router.fleet, *router.prefill_fleet]
        answers = await fan_out(router.client, everyone, request.method, target, headers, body)
        for replica in router.fleet:
            if request.path_params["command"] in LOSES_CACHE:
                router.chooser.prefixes.forget(replica.url)
            router.watcher.suspect(replica)  # its list of models may be another one
        good = all(answer.get("status") == 200 for answer in answers.values())
        return json_answer({"replicas": answers}, 200 if good else 502)

    table = [("/admin/replicas", show, "GET"), ("/admin/replicas", add, "POST"), ("/admin/replicas", remove, "DELETE"),
             ("/admin/drain", drain, "POST"), ("/admin/undrain", undrain, "POST"),
             ("/admin/{command:path}", forward, "POST"), ("/admin/{command:path}", forward, "GET")]  # fmt: skip
    return [Route(path, guarded(serve), methods=[method]) for path, serve, method in table]


def _describe(replica: Replica) -> dict[str, Any]:
    return {
        "replica": replica.url,
        "up": replica.health.up,
        "reason": replica.health.reason,
        "draining": replica.draining,
        "in_flight": replica.in_flight,
        "ejections": replica.health.ejections,
        "models": [entry["id"] for entry in replica.models],
    }


async def _raw(request: Any, most: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise RouteError(413, f"the body is over {most} bytes", "request_too_large")
    return bytes(body)


async def _body(request: Any) -> dict[str, Any]:
    import msgspec

    try:
        body = msgspec.json.decode(await _raw(request, 2**16))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RouteError(400, f"the body is no JSON: {error}", "invalid_json") from error
    if not isinstance(body, dict):
        raise RouteError(400, "the body is no JSON object", "invalid_json")
    return body


def _field(body: dict[str, Any], name: str, kind: Any, default: Any = None) -> Any:
    value = body.get(name, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RouteError(400, f"{name} is {value!r}, needs {'a text' if kind is str else 'a number'}", "invalid_value")
    return value


def as_route_error(error: Exception) -> RouteError:
    """What the caller did wrong, as an answer."""
    if isinstance(error, RouteError):
        return error
    status = 503 if isinstance(error, UnavailableError) else 400 if isinstance(error, ContractError) else 500
    return RouteError(status, str(error) if status != 500 else "the router failed", "router_error")
