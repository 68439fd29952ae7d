"""The OpenAPI document, made from the table of routes and the structs that parse the bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from glm5sdk.serve.server.errors import speaks_anthropic

if TYPE_CHECKING:
    from fastapi import FastAPI

    from glm5sdk.serve.server.routes import Route

__all__ = ["document_of"]

_REFUSALS = {
    400: "The request is malformed or asks for what there is not.",
    401: "The key is missing or wrong.",
    403: "The key does not open this route.",
    404: "There is no such model or route.",
    405: "The route does not take this method.",
    408: "The body came too slowly.",
    413: "The body is too long.",
    429: "Too much waits; Retry-After says when to come back.",
    500: "The server failed.",
    503: "The server is draining, or the request took too long.",
}
_KINDS = {"application/json": "object"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def document_of(app: FastAPI, routes: Sequence[Route]) -> dict[str, Any]:
    """The document; built once and kept by the application."""
    if app.openapi_schema is None:
        bodies = [route.body for route in routes if route.body is not None]
        schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
        found = iter(schemas)
        paths: dict[str, Any] = {}
        for route in routes:
            paths.setdefault(re.sub(r":\w+}", "}", route.path), {})[route.method.lower()] = _operation(
                route, None if route.body is None else next(found)
            )
        app.openapi_schema = {
            "openapi": "3.1.0",
            "info": {"title": app.title, "version": app.version},
            "paths": paths,
            "components": {
                "schemas": {**components, "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
            "security": [{"bearer": []}, {"x-api-key": []}, {}],
        }
    return app.openapi_schema


def _operation(route: Route, schema: dict[str, Any] | None) -> dict[str, Any]:
    error = "AnthropicError" if speaks_anthropic(route.path) else "Error"
    refused = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    responses: dict[str, Any] = {
        "200": {
            "description": "The answer.",
            "content": {
                media: {} if media == "text/event-stream" else {"schema": {"type": _KINDS.get(media, "string")}}
                for media in route.media
            },
        }
    }
    for status, text in _REFUSALS.items():
        responses[str(status)] = {"description": text, "content": refused}
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "responses": responses,
    }
    if names := re.findall(r"{(\w+)(?::\w+)?}", route.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if schema is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
