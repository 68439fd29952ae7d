"""create_app: all routes of the server as one ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

import glm5sdk
from glm5sdk.serve.interface import EngineClient
from glm5sdk.serve.server import routes
from glm5sdk.serve.server.errors import ApiError, as_api_error, error_response
from glm5sdk.serve.server.gate import Gate
from glm5sdk.serve.server.json_body import read_body
from glm5sdk.serve.server.limits import Admission
from glm5sdk.serve.server.metrics import Metrics
from glm5sdk.serve.server.model_text import ModelText
from glm5sdk.serve.server.openapi import document_of
from glm5sdk.serve.server.responses_store import ResponseStore
from glm5sdk.serve.server.service import Service
from glm5sdk.serve.server.settings import ServerSettings
from glm5sdk.serve.server.sse import HungUpError, while_connected

__all__ = ["create_app"]

CLIENT_CLOSED = 499


def create_app(engine: EngineClient, settings: ServerSettings, text: ModelText) -> FastAPI:
    """The server as an ASGI application.

    Args:
        engine: what generates.
        settings: what the operator decided.
        text: tokenizer and chat template of the engine's model.

    Returns:
        The application; `app.state.service` is what its routes share.
    """
    kept = ResponseStore(settings.max_stored_responses, settings.max_stored_bytes)
    text.most_tokens = engine.info.max_model_len
    service = Service(engine, settings, text, Metrics(engine), Admission(engine, settings), kept)
    # No documentation pages: they would load scripts from elsewhere.
    app = FastAPI(title="glm5sdk", version=glm5sdk.__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    for route in routes.ROUTES:
        app.add_api_route(
            route.path,
            _endpoint(service, route.handler),
            methods=["GET", "HEAD"] if route.method == "GET" else [route.method],
            summary=route.summary,
            operation_id=route.handler.__name__,
            response_model=None,
        )
    app.openapi = lambda: document_of(app, routes.ROUTES)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _http_error)
    app.add_middleware(Gate, service=service)
    if settings.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allow_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-glm5-weight-version", "x-request-id", "retry-after"],
        )
    return app


def _endpoint(
    service: Service, handler: Callable[[Service, Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await _answered(service, handler, request)
        except HungUpError:
            return Response(status_code=CLIENT_CLOSED)
        except Exception as error:  # noqa: BLE001  every failure has an answer
            return error_response(as_api_error(error), request.url.path)

    return endpoint


async def _answered(
    service: Service, handler: Callable[[Service, Request], Awaitable[Response]], request: Request
) -> Response:
    async def work() -> Response:
        async with asyncio.timeout(service.settings.request_timeout):
            return await handler(service, request)

    if request.method != "POST":
        return await work()
    # The body is read here, before somebody else listens for the client's end on the same channel.
    request.state.body = await read_body(request, service.settings)
    return await while_connected(request.receive, work())


async def _http_error(request: Request, error: Any) -> Response:
    """What the framework refuses on its own: unknown paths and methods."""
    status = getattr(error, "status_code", 400)
    words = {404: "there is no such route", 405: "this route does not take this method"}
    response = error_response(
        ApiError(status, f"{request.method} {request.url.path[:200]}: {words.get(status, 'the request is malformed')}"),
        request.url.path,
    )
    for name, value in (getattr(error, "headers", None) or {}).items():
        response.headers[name] = value
    return response
