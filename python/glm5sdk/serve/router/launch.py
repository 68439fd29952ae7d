"""LocalLauncher: processes of this machine, which end with the one that started them."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from glm5sdk.serve.ready import EP_MEETING, EP_RANK, EP_SIZE, READY_FD

__all__ = ["Launcher", "LocalLauncher", "Member", "Start"]

_PR_SET_PDEATHSIG = 1
LONGEST_LINE = 4096


class Member(Protocol):
    """A process, wherever it runs."""

    @property
    def pid(self) -> int:
        """Its number, for people."""
        ...

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        ...

    async def wait(self) -> int:
        """Until it has ended."""
        ...

    def send_signal(self, signal: int) -> None:
        """SIGTERM asks, SIGKILL ends."""
        ...


Start = Callable[[int], Awaitable[tuple[Member, asyncio.Task[str]]]]


class Launcher(Protocol):
    """Starts processes in groups."""

    def group(self, size: int) -> AbstractAsyncContextManager[Start]:
        """A new group: a function that starts the process of a rank and gives it with the task that ends with its URL.

        The URL is empty when the process will never serve. What a group needs besides is gone when its context ends.
        """
        ...


class LocalLauncher:
    """Runs one command.

    A process says that it serves by writing its URL, and a newline, to the file descriptor that its environment names.

    Args:
        command: what each process runs.
        environment: of the processes; by default this one's.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command = list(command)
        self._environment = dict(os.environ if environment is None else environment)

    @asynccontextmanager
    async def group(self, size: int) -> AsyncIterator[Start]:
        """See `Launcher.group`."""
        with tempfile.TemporaryDirectory(prefix="glm5-group-") as folder:

            async def start(rank: int) -> tuple[Member, asyncio.Task[str]]:
                place = {EP_RANK: str(rank), EP_SIZE: str(size), EP_MEETING: f"file://{folder}/meeting"}
                return await self._start(place if size > 1 else {})

            yield start

    async def _start(self, place: Mapping[str, str]) -> tuple[Member, asyncio.Task[str]]:
        read, write = os.pipe()
        environment = {**self._environment, **place, READY_FD: str(write)}
        try:
            # A session of its own: Ctrl-C is for the supervisor, which then ends its replicas in good order.
            process = await asyncio.create_subprocess_exec(
                *self._command, env=environment, pass_fds=(write,), start_new_session=True,
                preexec_fn=die_with_parent(),
            )  # fmt: skip
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        return process, asyncio.create_task(_line(read))


def die_with_parent() -> Callable[[], None] | None:
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
