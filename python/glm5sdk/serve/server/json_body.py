"""Request bodies: read within bounds, parsed strictly, refused with the field's name."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from glm5sdk.serve.server.errors import ApiError
from glm5sdk.serve.server.settings import ServerSettings

__all__ = ["parse_json", "read_body", "read_json"]

T = TypeVar("T")
_PATH = re.compile(r" - at `([^`]*)`$")


def read_json(request: Request, kind: type[T], settings: ServerSettings) -> T:
    """The body, which `read_body` has left in the request's state, as a struct; unknown fields are dropped.

    Raises:
        ApiError: 400 it is not what the struct says.
    """
    return parse_json(request.state.body, kind, settings.max_json_depth)


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """The body's bytes; reading stops where the limit is passed.

    Raises:
        ApiError: 408 or 413.
    """
    limit = settings.max_body_bytes
    too_long = ApiError(413, f"request: body is over {limit} bytes, needs at most that", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > limit):
        raise too_long
    chunks, size = [], 0
    try:
        async with asyncio.timeout(settings.body_timeout):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise too_long
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(
            408, f"request: body took over {settings.body_timeout} s, needs less", code="body_timeout"
        ) from None
    return b"".join(chunks)


def parse_json(body: bytes, kind: type[T], depth: int) -> T:
    """JSON bytes as a struct.

    Raises:
        ApiError: 400.
    """
    if not body:
        raise ApiError(400, "request: body is empty, needs a JSON object", code="invalid_json")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep(depth) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise ApiError(400, f"request: body is no JSON ({error}), needs a JSON object", code="invalid_json") from None
    if _deeper_than(value, depth):
        raise _too_deep(depth)
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        text = str(error)
        found = _PATH.search(text)
        param = found.group(1).removeprefix("$").removeprefix(".") if found else None
        text = text[: found.start()] if found else text
        raise ApiError(400, f"request: {param or 'body'}: {text}", param=param or None, code="invalid_value") from None


def _too_deep(depth: int) -> ApiError:
    return ApiError(400, f"request: body is nested too deeply, needs at most {depth} levels", code="invalid_json")


def _deeper_than(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        inner: list[Any] = []
        for part in level:
            children = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
            inner.extend(child for child in children if isinstance(child, (dict, list)))
        if not inner:
            return False
        level = inner
    return True
