"""Supervisor: starts replicas as processes, watches them, starts them again, and leaves none behind.

Replicas whose experts are spread over each other form a group: one that dies takes the collectives of the others with
it, so a group is started, and started again, as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from glm5sdk.core.errors import ContractError, UnavailableError
from glm5sdk.core.log import get_logger
from glm5sdk.serve.ready import EP_MEETING, EP_RANK, EP_SIZE, READY_FD

__all__ = ["Restarts", "Supervisor"]

log = get_logger("serve.router")

_PR_SET_PDEATHSIG = 1
LONGEST_LINE = 4096


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
    """Runs `groups` groups of `size` processes of one command.

    A process says that it serves by writing its URL, and a newline, to the file descriptor that its environment names.
    """

    def __init__(
        self, command: Sequence[str], groups: int, size: int, *, up: Callable[[str], None],
        down: Callable[[str], Awaitable[None]], environment: Mapping[str, str] | None = None,
        restarts: Restarts | None = None,
    ) -> None:  # fmt: skip
        """Plan.

        Args:
            command: what each process runs.
            groups: independent groups.
            size: processes a group.
            up: is told the URL of a process that serves.
            down: is told when it no longer does.
            environment: of the processes; by default this one's.
            restarts: how to come back.
        """
        if groups < 1 or size < 1:
            raise ContractError(f"supervisor: groups, size are {groups}, {size}, needs at least 1 each")
        self._command, self._count, self._size = list(command), groups, size
        self._up, self._down = up, down
        self._environment = dict(os.environ if environment is None else environment)
        self._restarts = restarts or Restarts()
        self._alive: dict[int, list[asyncio.subprocess.Process]] = {}
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
        with tempfile.TemporaryDirectory(prefix="glm5-group-") as folder:
            group = self._alive[number] = []
            ready: list[asyncio.Task[str]] = []
            try:
                for rank in range(self._size):
                    process, url = await self._start(rank, folder)
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

    async def _start(self, rank: int, folder: str) -> tuple[asyncio.subprocess.Process, asyncio.Task[str]]:
        read, write = os.pipe()
        environment = {**self._environment, READY_FD: str(write)}
        if self._size > 1:
            environment |= {EP_RANK: str(rank), EP_SIZE: str(self._size), EP_MEETING: f"file://{folder}/meeting"}
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                env=environment,
                pass_fds=(write,),
                preexec_fn=_die_with_parent(),
                start_new_session=True,
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        return process, asyncio.create_task(_line(read))

    async def _end(self, processes: Sequence[asyncio.subprocess.Process], patience: float) -> None:
        if patience:
            for process in processes:
                _send(process, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await asyncio.gather(*(process.wait() for process in processes))
        for process in processes:
            _send(process, signal.SIGKILL)
        await asyncio.gather(*(process.wait() for process in processes))


def _send(process: asyncio.subprocess.Process, number: int) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


def _die_with_parent() -> Callable[[], None] | None:
    """What a child does first: it asks Linux for SIGKILL when the thread that made it is gone."""
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()  # loaded here: after the fork there is little that one may do

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it went before we could ask
            os._exit(1)

    return ask


async def _line(descriptor: int) -> str:
    """The first line that comes through a pipe; empty when it is closed before."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LONGEST_LINE)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
    )
    try:
        line = await reader.readline()
        return line.decode("utf-8", "replace").strip() if line.endswith(b"\n") else ""
    except ValueError:  # a line without end
        return ""
    finally:
        transport.close()
