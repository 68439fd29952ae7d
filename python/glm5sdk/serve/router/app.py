"""Router: the parts put together, as an ASGI application for uvicorn."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from glm5sdk.core.errors import Glm5Error, UnavailableError
from glm5sdk.serve.router.admin import admin_routes, as_route_error, fan_out, json_answer
from glm5sdk.serve.router.choose import Chooser
from glm5sdk.serve.router.errors import RouteError, error_body
from glm5sdk.serve.router.handoffs import Handoffs
from glm5sdk.serve.router.keys import need_key
from glm5sdk.serve.router.metrics import RouterMetrics
from glm5sdk.serve.router.proxy import Proxy, Receive, Send
from glm5sdk.serve.router.replicas import Fleet, Replica
from glm5sdk.serve.router.settings import RouterSettings
from glm5sdk.serve.router.watch import Watcher

__all__ = ["Router", "create_router"]

PROXIED = ("/v1/", "/tokenize", "/detokenize", "/version", "/openapi.json", "/docs")
TO_ALL = ("/abort",)


def create_router(settings: RouterSettings) -> Router:
    """A router for these replicas; serve it with uvicorn, or call `start` and `stop` around its use."""
    return Router(settings)


class Router:
    """An ASGI application. Its lifespan starts and stops the health checks and the connections.

    Attributes:
        settings: as given.
        fleet, chooser, metrics: its parts; `prefill_fleet` computes prompts for `fleet`, where it is not empty.
        client: connections to the replicas; from `start` to `stop`.
    """

    def __init__(self, settings: RouterSettings) -> None:
        try:
            import httpx
            import msgspec  # noqa: F401
            from starlette.applications import Starlette
            from starlette.routing import Route
        except ImportError as error:
            raise UnavailableError(f'router: {error.name} is missing; pip install "glm5sdk[serve]"') from error
        self.settings = settings
        self.fleet = Fleet(settings.replicas, settings.health)
        self.chooser = Chooser(self.fleet, settings.affinity)
        self.prefill_fleet = Fleet(settings.prefill, settings.health)
        self.metrics = RouterMetrics(self.fleet, self.prefill_fleet)
        # No environment: a proxy variable must not send prompts elsewhere.
        self.client = httpx.AsyncClient(
            trust_env=False, timeout=httpx.Timeout(settings.read_timeout, connect=settings.connect_timeout, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        )  # fmt: skip
        self.watcher = Watcher(self.chooser, self.metrics, self.client, settings.api_keys)
        prefill = Chooser(self.prefill_fleet, settings.affinity)
        self.prefill_watcher = Watcher(prefill, self.metrics, self.client, settings.api_keys)
        self.handoffs = Handoffs(
            settings, self.chooser, self.metrics, self.client,
            (prefill, self.prefill_watcher) if settings.prefill else None,
        )  # fmt: skip
        self._proxy = Proxy(
            settings, self.chooser, self.watcher, self.metrics, self.client,
            self.handoffs.prepare if settings.prefill or settings.migrate else None,
        )  # fmt: skip
        self._own = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/abort", self._abort, methods=["POST"]),
                *admin_routes(self),
            ],
            exception_handlers={RouteError: _answer_error, Glm5Error: _answer_error, 404: _missing, 405: _missing},
        )

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http" and _proxied(scope["path"]):
            await self._proxy(scope, receive, send)
        else:
            await self._own(scope, receive, send)

    async def start(self) -> None:
        """Ask every replica once, then keep asking."""
        both = ((self.fleet, self.watcher), (self.prefill_fleet, self.prefill_watcher))
        await asyncio.gather(*(watcher.check(replica) for fleet, watcher in both for replica in fleet))
        for fleet, watcher in both:
            for replica in fleet:
                watcher.watch(replica)

    async def stop(self) -> None:
        """End the checks and close the connections."""
        await self.watcher.close()
        await self.prefill_watcher.close()
        await self.handoffs.close()
        await self.client.aclose()

    def add_replica(self, url: str) -> Replica:
        """Take a replica in; it gets requests after its first good check."""
        replica = self.fleet.add(url)
        self.watcher.watch(replica)
        return replica

    async def remove_replica(self, url: str) -> Replica:
        """Take one out at once; what runs on it goes on."""
        replica = self.fleet.remove(url)
        await self.watcher.leave(replica)
        self.chooser.lost(replica.url)
        return replica

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            kind = (await receive())["type"]
            if kind == "lifespan.startup":
                await self.start()
                await send({"type": "lifespan.startup.complete"})
            elif kind == "lifespan.shutdown":
                await self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _health(self, request: Any) -> Any:
        up = sum(r.open for r in self.fleet)
        return json_answer({"status": "ok" if up else "no replica is up", "replicas": len(self.fleet), "up": up},
                           200 if up else 503)  # fmt: skip

    async def _metrics(self, request: Any) -> Any:
        from starlette.responses import Response

        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: Any) -> Any:
        need_key(request.headers, self.settings.api_keys)
        merged: dict[Any, Any] = {}
        for replica in self.fleet:
            if replica.health.up:
                for entry in replica.models:
                    merged.setdefault(entry["id"], entry)
        return json_answer({"object": "list", "data": list(merged.values())})

    async def _abort(self, request: Any) -> Any:
        """A request's name does not say where it runs: everybody is told."""
        need_key(request.headers, self.settings.api_keys)
        headers = {
            n: request.headers[n] for n in ("authorization", "x-api-key", "content-type") if n in request.headers
        }
        up = [replica for replica in self.fleet if replica.health.up]
        answers = await fan_out(self.client, up, "POST", "/abort", headers, await request.body())
        good = any(answer.get("status") == 200 for answer in answers.values())
        return json_answer({"replicas": answers}, 200 if good else 502)


def _proxied(path: str) -> bool:
    return path == "/" or (path.startswith(PROXIED) and path.rstrip("/") != "/v1/models")


async def _answer_error(request: Any, error: Exception) -> Any:
    told = as_route_error(error)
    return json_answer(error_body(request.url.path, told.status, told.message, told.code), told.status)


async def _missing(request: Any, error: Any) -> Any:
    words = "there is no such route" if error.status_code == 404 else "the route does not take this method"
    return json_answer(error_body(request.url.path, error.status_code, words, "not_found"), error.status_code)
