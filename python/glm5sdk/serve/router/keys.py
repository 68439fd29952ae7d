"""Keys in headers: found in any of the ways clients send them, compared in constant time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hmac import compare_digest

from glm5sdk.serve.router.errors import RouteError

__all__ = ["need_admin", "need_key"]


def need_key(headers: Mapping[str, str], keys: Iterable[str]) -> None:
    """Refuse with 401 unless one of the keys was sent; no keys let everybody in."""
    keys = tuple(keys)
    if keys and not _sent(headers, keys):
        raise RouteError(401, "the API key is missing or wrong", "invalid_api_key")


def need_admin(headers: Mapping[str, str], key: str | None) -> None:
    """Refuse with 403 when there is no admin key, 401 unless it was sent."""
    if key is None:
        raise RouteError(403, "admin routes are off: the router was started without an admin key", "admin_disabled")
    if not _sent(headers, (key,)):
        raise RouteError(401, "the admin key is missing or wrong", "invalid_api_key")


def _sent(headers: Mapping[str, str], keys: tuple[str, ...]) -> bool:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    offered = [token.strip()] if scheme.lower() == "bearer" else []
    offered += [headers[name] for name in ("x-api-key", "x-admin-key") if name in headers]
    # Every pair is compared, so that the time does not tell which key was close.
    matches = [compare_digest(a.encode("utf-8", "replace"), b.encode()) for a in offered for b in keys]
    return any(matches)
