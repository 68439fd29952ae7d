"""One port in front of many processes: a supervisor and a router in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from glm5sdk.core.errors import ContractError
from glm5sdk.serve.router.app import create_router
from glm5sdk.serve.router.launch import Launcher
from glm5sdk.serve.router.listen import listen, server_on, url_of
from glm5sdk.serve.router.settings import RouterSettings
from glm5sdk.serve.router.supervisor import Restarts, Supervisor

__all__ = ["serve_processes"]


def serve_processes(
    launcher: Launcher, settings: RouterSettings, *, replicas: int, spread: int, host: str, port: int,
    drain_seconds: float, log_level: str = "warning", say: Callable[[str], None] = lambda words: None,
) -> None:  # fmt: skip
    """Start the processes, route to them until a signal, then let what runs end.

    Args:
        launcher: starts replicas.
        settings: of the router; replicas join it as they come up.
        replicas: processes.
        spread: processes over which experts are spread, a divisor of `replicas`; 1 gives each its own.
        host: address to listen at.
        port: 0 takes a free one.
        drain_seconds: for requests that run when a signal comes.
        log_level: of uvicorn.
        say: is told what a person would like to know.

    Raises:
        ContractError: the numbers do not fit together.
        OSError: the port is taken.
        UnavailableError: a replica ended before it ever served.
    """
    if replicas < 1 or spread < 1 or replicas % spread:
        raise ContractError(f"serve: dp, ep are {replicas}, {spread}, needs at least 1 each and dp a multiple of ep")
    asyncio.run(_serve(launcher, settings, replicas // spread, spread, host, port, drain_seconds, log_level, say))


async def _serve(
    launcher: Launcher, settings: RouterSettings, groups: int, size: int, host: str, port: int,
    drain_seconds: float, log_level: str, say: Callable[[str], None],
) -> None:  # fmt: skip
    sock = listen(host, port)
    router = create_router(replace(settings, replicas=()))

    def up(url: str) -> None:
        router.add_replica(url)
        say(f"replica {url} serves")

    async def down(url: str) -> None:
        await router.remove_replica(url)
        say(f"replica {url} is gone")

    restarts = Restarts(kill_after=drain_seconds + 5.0)
    supervisor = Supervisor(launcher, groups, size, up=up, down=down, restarts=restarts)
    server = server_on(router, log_level, max(1, round(drain_seconds)))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    say(f"{url_of(sock)} in front of {groups * size} replicas, which are starting")
    running = asyncio.create_task(supervisor.run())
    try:
        await asyncio.wait({serving, running}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        # A signal ends the server, which has drained by then; a replica that cannot start ends the supervisor.
        server.should_exit = True
        await serving
        await supervisor.stop()
        await running
