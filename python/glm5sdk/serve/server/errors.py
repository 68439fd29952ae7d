"""Every refusal as one exception, and how OpenAI's and Anthropic's clients want to see it."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
from starlette.responses import Response

from glm5sdk.core.errors import CapacityError, CheckpointError, ContractError, UnavailableError
from glm5sdk.core.log import get_logger
from glm5sdk.serve.interface import OverloadedError

__all__ = ["ApiError", "as_api_error", "error_event", "error_response", "speaks_anthropic"]

log = get_logger("serve")

MAX_MESSAGE = 1000  # characters: what a client sent may be part of it
# How SamplingParams names a field that is wrong.
_FIELD = re.compile(r"sampling params: (\w+) ")

_OPENAI = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """A request is refused.

    Attributes:
        status: of HTTP.
        message: one sentence.
        param: the field that is wrong.
        code: a word for programs.
        retry_after: seconds after which trying again makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else f"{message[:500]} ... {message[-400:]}"
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self, anthropic: bool = False) -> dict[str, Any]:
        """The JSON body in one of the two protocols' shapes."""
        if anthropic:
            kind = _ANTHROPIC.get(self.status, "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = _OPENAI.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told about an exception. Unexpected ones are logged and told without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverloadedError):
        return ApiError(429, str(error), code="overloaded", retry_after=error.retry_after)
    if isinstance(error, UnavailableError):
        return ApiError(503, str(error), code="unavailable")
    if isinstance(error, (ContractError, CapacityError)):
        found = _FIELD.match(str(error))
        return ApiError(400, str(error), param=found.group(1) if found else None)
    if isinstance(
        error, CheckpointError
    ):  # the checkpoint's chat template does what it may not, with this conversation
        log.error("a chat template failed", exc_info=error)
        return ApiError(400, str(error), code="template_failed")
    if isinstance(error, TimeoutError):
        return ApiError(503, "the request took longer than the server allows", code="request_timeout", retry_after=1)
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def speaks_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's protocol."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_response(error: ApiError, path: str) -> Response:
    """An error as an HTTP response, in the shape that the path's clients read."""
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(min(error.retry_after, 86400.0))))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["connection"] = "close"  # what is left of the body is not wanted
    content = msgspec.json.encode(error.body(speaks_anthropic(path)))
    return Response(content, error.status, headers, "application/json")


def error_event(error: ApiError, anthropic: bool = False) -> dict[str, Any]:
    """An error as the payload of an event in a stream that has begun."""
    return error.body(anthropic)
