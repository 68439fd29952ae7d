"""Supervisor: starts replicas as processes, watches them, starts them again, and leaves none behind.

Replicas whose experts are spread over each other form a group: one that dies takes the collectives of the others with
it, so a group is started, and started again, as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from glm5sdk.core.errors import ContractError, UnavailableError
from glm5sdk.core.log import get_logger
from glm5sdk.serve.router.launch import Launcher, Member

__all__ = ["Restarts", "Supervisor"]

log = get_logger("serve.router")


@dataclass(frozen=True)
class Restarts:
    """How a group that died comes back.

    Attributes:
        first: seconds before the first restart; doubles with each one that follows.
        longest: seconds at most.
        stable: seconds of life after which the count begins anew.
        kill_after: seconds between asking a process to end and ending it.
    """

    first: float = 0.5
    longest: float = 30.0
    stable: float = 60.0
    kill_after: float = 35.0

    def delay(self, failures: int) -> float:
        """Seconds before the restart after so many failures in a row, at least 1."""
        return min(self.longest, self.first * 2.0 ** min(failures - 1, 30))


class Supervisor:
    """Runs `groups` groups of `size` processes each, wherever its launcher starts them."""

    def __init__(
        self, launcher: Launcher, groups: int, size: int, *, up: Callable[[str], None],
        down: Callable[[str], Awaitable[None]], restarts: Restarts | None = None,
    ) -> None:  # fmt: skip
        """Plan.

        Args:
            launcher: starts them.
            groups: independent groups.
            size: processes a group.
            up: is told the URL of a process that serves.
            down: is told when it no longer does.
            restarts: how to come back.
        """
        if groups < 1 or size < 1:
            raise ContractError(f"supervisor: groups, size are {groups}, {size}, needs at least 1 each")
        self._launcher, self._count, self._size = launcher, groups, size
        self._up, self._down = up, down
        self._restarts = restarts or Restarts()
        self._alive: dict[int, list[Member]] = {}
        self._stopping = False
        self.restarted = 0

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        return [p.pid for group in self._alive.values() for p in group if p.returncode is None]

    async def run(self) -> None:
        """Until `stop`.

        Raises:
            UnavailableError: a group ended before it ever served; trying again would not help.
        """
        tasks = [asyncio.create_task(self._keep(number)) for number in range(self._count)]
        try:
            await asyncio.gather(*tasks)
        finally:
            self._stopping = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Ask all to end, wait, end those that do not."""
        self._stopping = True
        await self._end([p for group in self._alive.values() for p in group], self._restarts.kill_after)

    async def _keep(self, number: int) -> None:
        served_once, failures = False, 0
        while not self._stopping:
            served, lived = await self._life(number)
            if self._stopping:
                return
            if not served and not served_once:
                codes = [p.returncode for p in self._alive.get(number, [])]
                raise UnavailableError(f"serve: replica group {number} ended with status {codes} before it served; its "
                                       "own words stand above")  # fmt: skip
            served_once |= served
            failures = 1 if lived >= self._restarts.stable else failures + 1
            delay = self._restarts.delay(failures)
            self.restarted += 1
            log.warning("replica group %d died, starts again in %.1f s", number, delay)
            await asyncio.sleep(delay)

    async def _life(self, number: int) -> tuple[bool, float]:
        """Start a group, serve until one of it ends, end the others. Returns whether it served, and for how long."""
        urls: list[str] = []
        begun = monotonic()
        async with self._launcher.group(self._size) as start:
            group = self._alive[number] = []
            ready: list[asyncio.Task[str]] = []
            try:
                for rank in range(self._size):
                    process, url = await start(rank)
                    group.append(process)
                    ready.append(url)
                ended = [asyncio.create_task(process.wait()) for process in group]
                together = asyncio.gather(*ready)
                await asyncio.wait({together, *ended}, return_when=asyncio.FIRST_COMPLETED)
                if together.done() and not together.cancelled() and all(together.result()):
                    urls = list(together.result())
                    begun = monotonic()
                    for url in urls:
                        self._up(url)
                    await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
                else:
                    together.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await together
            except asyncio.CancelledError:
                await self._end(group, 0.0)
                raise
            finally:
                for task in ready:
                    task.cancel()
                for url in urls:
                    await self._down(url)
                # While stopping, `stop` gives them their time; a broken group has nothing left to finish.
                if not self._stopping:
                    await self._end(group, 0.0)
                await asyncio.gather(*(process.wait() for process in group))
        return bool(urls), monotonic() - begun

    async def _end(self, processes: Sequence[Member], patience: float) -> None:
        if patience:
            for process in processes:
                _send(process, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await asyncio.gather(*(process.wait() for process in processes))
        for process in processes:
            _send(process, signal.SIGKILL)
        await asyncio.gather(*(process.wait() for process in processes))


def _send(process: Member, number: int) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
