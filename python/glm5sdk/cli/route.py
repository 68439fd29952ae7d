"""`glm5 route`: the router on a port."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console

from glm5sdk.core.errors import ContractError
from glm5sdk.serve.router.listen import listen, server_on, url_of
from glm5sdk.serve.router.settings import RouterSettings

__all__ = ["keys_from", "route_requests"]

API_KEY, ADMIN_KEY = "GLM5SDK_API_KEY", "GLM5SDK_ADMIN_KEY"


def keys_from(api_keys: Sequence[str], admin_key: str | None) -> tuple[tuple[str, ...], str | None]:
    """Keys of the command line, else of the environment, where other users of the machine cannot read them."""
    return (
        tuple(api_keys) or tuple(key for key in os.environ.get(API_KEY, "").split(",") if key),
        admin_key or os.environ.get(ADMIN_KEY) or None,
    )


def route_requests(
    console: Console, settings: RouterSettings, host: str, port: int, drain_seconds: int, log_level: str
) -> None:
    """Serve until a signal; running requests are finished first.

    Raises:
        ContractError: there is no replica and no way to add one.
        UnavailableError: the extra [serve] is not installed.
        OSError: the port is taken.
    """
    if not settings.replicas and settings.admin_key is None:
        raise ContractError("route: replicas is empty, needs --replica URL, or --admin-key to add some later")
    from glm5sdk.serve.router.app import create_router

    router = create_router(settings)
    server = server_on(router, log_level, drain_seconds)
    sock = listen(host, port)
    count = len(settings.replicas) + len(settings.prefill)
    console.print(f"glm5 route: {url_of(sock)} in front of {count} replicas", markup=False, highlight=False)
    server.run(sockets=[sock])
