"""A server of `server_fakes` on a port of its own, for clients that want a real connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from server_fakes import Bench

from glm5sdk.serve.server.run import DrainingServer


@contextmanager
def live(bench: Bench) -> Iterator[str]:
    """Serve; yields the address."""
    config = uvicorn.Config(
        bench.app, host="127.0.0.1", port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1, ws="none"
    )
    server = bench.server = DrainingServer(config, bench.service)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not server.started and time.monotonic() < end:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)


def until(condition: object, seconds: float = 10.0) -> bool:
    """Wait until a function is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.01)
    return False
