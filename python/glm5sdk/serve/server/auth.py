"""Who may call what: a key for the ordinary routes, another one for the administrator's."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from glm5sdk.serve.server.errors import ApiError

__all__ = ["OPEN_PATHS", "Keys"]

# A probe and a scraper carry no key; the page holds nothing but the form to type one in.
OPEN_PATHS = frozenset({"/", "/health", "/metrics"})


class Keys:
    """Compares keys in a time that tells nothing about them.

    Args:
        api_keys: any of them opens the ordinary routes; none opens them to everyone.
        admin_key: opens all routes; without one nothing opens /admin.
    """

    def __init__(self, api_keys: Iterable[str], admin_key: str | None) -> None:
        self._api = [_digest(key) for key in api_keys]
        self._admin = _digest(admin_key) if admin_key else None

    def check(self, path: str, headers: Mapping[str, str]) -> None:
        """Let a request pass.

        Args:
            path: of the request.
            headers: its headers, names in small letters.

        Raises:
            ApiError: 401 there is no key or a wrong one, 403 the key does not open this route.
        """
        administrative = path == "/admin" or path.startswith("/admin/")
        if administrative and self._admin is None:
            raise ApiError(403, "server: no admin key is configured, needs --admin-key to open /admin", code="no_admin")
        if path in OPEN_PATHS or (not self._api and not administrative):
            return
        given = [_digest(key) for key in _keys(headers)]
        # Everything is compared with everything: the time tells nothing.
        ordinary = sum(hmac.compare_digest(one, key) for one in given for key in self._api) > 0
        admin = self._admin is not None and sum(hmac.compare_digest(one, self._admin) for one in given) > 0
        if admin or (ordinary and not administrative):
            return
        if ordinary:
            raise ApiError(403, "server: this key does not open /admin, needs the admin key", code="not_admin")
        raise ApiError(
            401,
            "server: the API key is missing or wrong, needs `Authorization: Bearer KEY` or `x-api-key: KEY`",
            code="invalid_api_key",
        )


def _keys(headers: Mapping[str, str]) -> tuple[str, str]:
    """Both places where clients put keys; some fill one with a word of their own."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
