"""Run an application under uvicorn; SIGTERM drains before it ends."""

from __future__ import annotations

import socket
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from glm5sdk.core.log import get_logger
from glm5sdk.serve.bounded_heads import http_protocol
from glm5sdk.serve.ready import announce
from glm5sdk.serve.router.listen import url_of
from glm5sdk.serve.server.service import Service

__all__ = ["DrainingServer", "serve"]

log = get_logger("serve")
GRACE_SECONDS = 2.0  # for the last words of what was aborted


class DrainingServer(uvicorn.Server):
    """At the first signal new work is refused with 503 and what runs goes on, for so long as settings allow.

    A second signal ends it at once.

    Args:
        config: of uvicorn.
        service: what is drained.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._deadline: float | None = None
        self._cut = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come. It is not raised again at the end: a drained server ends with status 0."""
        if self._deadline is not None:
            self.should_exit = self.force_exit = True
            return
        self._deadline = time.monotonic() + self._service.settings.drain_seconds
        self._service.draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen; a supervisor is told where."""
        await super().startup(sockets)
        if self.started:
            announce(url_of(self.servers[0].sockets[0]))

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; True ends the server."""
        if self._deadline is not None:
            late = time.monotonic() >= self._deadline
            if self._service.in_flight == 0 or (late and self._cut):
                self.should_exit = True
            elif late:
                self._cut = True
                self._deadline += GRACE_SECONDS
                await self._abort_all()
        return await super().on_tick(counter)

    async def _abort_all(self) -> None:
        """Time is up: what runs ends here, and every client hears of it instead of seeing a broken connection."""
        names = [name for names in self._service.alive.values() for name in names]
        log.warning("drained for as long as allowed; %d requests are aborted", len(names))
        for name in names:
            await self._service.engine.abort(name)


def serve(app: FastAPI, *, host: str, port: int, log_level: str = "info", access_log: bool = False) -> None:
    """Serve until a signal.

    Args:
        app: of `create_app`.
        host: address to listen on.
        port: 0 takes a free one; the log says which.
        log_level: of uvicorn.
        access_log: a line for every request.
    """
    config = uvicorn.Config(
        app, host=host, port=port, log_level=log_level, access_log=access_log, server_header=False, ws="none",
        http=http_protocol(), lifespan="off", timeout_graceful_shutdown=1, timeout_keep_alive=30,
    )  # fmt: skip
    DrainingServer(config, app.state.service).run()
