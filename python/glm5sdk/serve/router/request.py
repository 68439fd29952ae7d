"""What the router reads in a request: its session, its prompt, its model. It judges nothing; replicas do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RoutedRequest", "read_request"]

SESSION_FIELDS = ("session_id", "prompt_cache_key", "user")
FIRST = 1024  # bytes of a prompt that stand for a request which names no session


@dataclass(frozen=True)
class RoutedRequest:
    """One request as the router sees it.

    Attributes:
        path: of the URL.
        session: what ties requests together by the client's own word; None when it said nothing.
        key: what is hashed onto the ring: the session, else the beginning of the prompt.
        prompt: bytes of which two requests share a prefix when their prompts do.
        salt: requests under different salts share no cache.
        model: the name that was asked for.
        response_id: an earlier response that only the replica which made it knows.
        stream: whether the answer is to be a stream of events.
        body: the parsed body; empty when it is no JSON object.
    """

    path: str
    session: str | None
    key: bytes
    prompt: bytes
    salt: bytes = b""
    model: str | None = None
    response_id: str | None = None
    stream: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)


def read_request(path: str, headers: Mapping[str, str], raw: bytes) -> RoutedRequest:
    """Read what is there; a body that cannot be parsed still gets a place, and the replica says what is wrong.

    Args:
        path: of the URL.
        headers: lower-case names.
        raw: the body.
    """
    import msgspec

    try:
        parsed = msgspec.json.decode(raw) if raw else {}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        parsed = {}
    body: Mapping[str, Any] = parsed if isinstance(parsed, dict) else {}
    session = _session(headers, body)
    prompt = _prompt(body) or raw
    response = _text(body, "previous_response_id") or _response_in_path(path)
    return RoutedRequest(
        path=path,
        session=session,
        key=session.encode("utf-8", "surrogatepass") if session else prompt[:FIRST],
        prompt=prompt,
        salt=(_text(body, "cache_salt") or "").encode("utf-8", "surrogatepass"),
        model=_text(body, "model"),
        response_id=response,
        stream=body.get("stream") is True,
        body=body,
    )


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    return value if isinstance(value, str) and value else None


def _session(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    if named := headers.get("x-session-id"):
        return f"header:{named}"
    for name in SESSION_FIELDS:
        if value := _text(body, name):
            return f"{name}:{value}"
    metadata = body.get("metadata")
    if isinstance(metadata, dict) and (value := _text(metadata, "user_id")):
        return f"user_id:{value}"
    return None


def _response_in_path(path: str) -> str | None:
    parts = path.split("/")
    return parts[3] if parts[:3] == ["", "v1", "responses"] and len(parts) > 3 and parts[3] else None


def _prompt(body: Mapping[str, Any]) -> bytes:
    """The prompt in the order in which a template writes it: tools, system, then message by message."""
    import msgspec

    encode = msgspec.json.Encoder(order="sorted").encode
    parts: list[Any] = [
        body[name] for name in ("tools", "functions", "system", "instructions") if body.get(name) is not None
    ]
    for name in ("messages", "input", "prompt"):
        value = body.get(name)
        if isinstance(value, list):
            parts.extend(value)
        elif value is not None:
            parts.append(value)
    # Texts without their closing quote, and no brackets around lists: what grows keeps its beginning.
    return b"\n".join(p.encode("utf-8", "surrogatepass") if isinstance(p, str) else encode(p) for p in parts)
