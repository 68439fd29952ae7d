"""Errors that the router itself answers with, in the shape that the route's clients read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["RouteError", "error_body", "error_event"]

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    502: "api_error",
    503: "overloaded_error",
}


@dataclass
class RouteError(Exception):
    """The router gives up on a request before anything was sent to the client.

    Attributes:
        status: of HTTP.
        message: for the client.
        code: a word for programs.
        retry_after: seconds, where trying again helps.
    """

    status: int
    message: str
    code: str
    retry_after: float | None = None


def error_body(path: str, status: int, message: str, code: str) -> dict[str, Any]:
    """The JSON of an error, Anthropic's on its routes and OpenAI's elsewhere."""
    kind = TYPES.get(status, "api_error")
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_event(path: str, message: str, code: str) -> bytes:
    """The event that ends a broken stream; no `[DONE]` follows it.

    The clients of chat and completions raise on a data line with a true "error"; so does that of responses, which also
    knows an event named so.
    """
    import msgspec

    body = error_body(path, 502, message, code)
    name = b""
    if path.startswith("/v1/messages"):
        name = b"event: error\n"
    elif path.startswith("/v1/responses"):
        name = b"event: error\n"
        body = {"type": "error", "code": code, "message": message, "param": None, **body}
    return name + b"data: " + msgspec.json.encode(body) + b"\n\n"
