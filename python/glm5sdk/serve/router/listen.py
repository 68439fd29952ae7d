"""A listening socket first, then a server on it: a port that is taken is an error, port 0 is known before it serves."""

from __future__ import annotations

import socket
from types import FrameType
from typing import Any

from glm5sdk.core.errors import UnavailableError
from glm5sdk.serve.bounded_heads import http_protocol

__all__ = ["check_free", "listen", "server_on", "url_of"]


def listen(host: str, port: int) -> socket.socket:
    """A TCP socket bound to this address.

    Raises:
        OSError: the address is taken or does not exist.
    """
    sock = _bound(host, port)
    try:
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from error
    return sock


def check_free(host: str, port: int) -> None:
    """Look whether this address can be had, before minutes go into loading a model. Port 0 always can.

    Raises:
        OSError: the address is taken or does not exist.
    """
    if port:
        _bound(host, port).close()


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from error
    return sock


def url_of(sock: socket.socket) -> str:
    """Where a client on this machine finds it."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_on(app: Any, log_level: str, drain: int) -> Any:
    """A uvicorn server for a router, to be run with `sockets=[...]`.

    Args:
        app: ASGI.
        log_level: uvicorn's word.
        drain: seconds that running requests may take after a signal.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise UnavailableError('router: uvicorn is missing; pip install "glm5sdk[serve]"') from error
    config = uvicorn.Config(
        app, log_level=log_level, access_log=False, server_header=False, lifespan="on", ws="none",
        timeout_graceful_shutdown=drain, http=http_protocol(),
    )  # fmt: skip

    class Server(uvicorn.Server):
        """The first signal drains, the second ends; a server that has drained ends with status 0."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.force_exit = self.should_exit
            self.should_exit = True

    return Server(config)
