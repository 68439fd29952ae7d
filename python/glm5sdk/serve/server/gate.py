"""What every request passes before its route: counting, keys, draining; and the answer's last words."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm5sdk.core.log import get_logger
from glm5sdk.serve.server.auth import OPEN_PATHS, Keys
from glm5sdk.serve.server.errors import ApiError, as_api_error, error_response
from glm5sdk.serve.server.generation import header_text
from glm5sdk.serve.server.service import Service

__all__ = ["Gate"]

log = get_logger("serve")
VERSION_HEADER = b"x-glm5-weight-version"


class Gate:
    """ASGI middleware.

    Args:
        app: what is behind it.
        service: whose requests are counted.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._keys = Keys(service.settings.api_keys, service.settings.admin_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status = 500
        begun = False

        async def watched(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                if not any(name == VERSION_HEADER for name, _ in message["headers"]):  # nothing was generated
                    current = header_text(self._service.engine.stats().weight_version)
                    message = {**message, "headers": [*message["headers"], (VERSION_HEADER, current.encode())]}
            await send(message)

        self._service.in_flight += 1
        try:
            try:
                self._let_in(scope)
                await self._app(scope, receive, watched)
            except ApiError as error:
                await error_response(error, scope["path"])(scope, receive, watched)
            except Exception as error:
                if begun:
                    log.error("an answer broke off", exc_info=error)
                    raise
                await error_response(as_api_error(error), scope["path"])(scope, receive, watched)
        finally:
            self._service.in_flight -= 1
            self._service.metrics.http.labels(_route(scope), str(status)).inc()

    def _let_in(self, scope: MutableMapping[str, Any]) -> None:
        path = scope["path"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self._keys.check(path, headers)
        draining = self._service.draining and path not in OPEN_PATHS and not path.startswith("/admin/")
        if draining and path != "/abort":
            raise ApiError(503, "server: draining, takes no new work", code="draining", retry_after=5)
        declared = headers.get("content-length", "0")
        limit = self._service.settings.max_body_bytes
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > limit):
            raise ApiError(413, f"request: body is over {limit} bytes, needs at most that", code="request_too_large")


def _route(scope: MutableMapping[str, Any]) -> str:
    """The route's own pattern; paths that nobody serves share a word, or a scan would fill the metrics."""
    route = scope.get("route")
    return getattr(route, "path", "unknown")
