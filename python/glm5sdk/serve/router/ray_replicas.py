"""RayLauncher: replicas on the machines of a Ray cluster, one actor a replica.

The actor only holds the replica's process: it starts it on its own machine, tells its URL, waits for its end, and takes
it along when the actor or its machine dies. Requests never pass through Ray; the router reaches replicas by HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from glm5sdk.core.errors import UnavailableError
from glm5sdk.serve.ready import EP_MEETING, EP_RANK, EP_SIZE, READY_FD
from glm5sdk.serve.router.launch import Member, Start, die_with_parent

__all__ = ["ADDRESS", "RayLauncher"]

ADDRESS = "{address}"  # stands in a command for the address of the machine that the replica runs on


class RayLauncher:
    """Starts replicas as actors; the model's folder must be there under the same path on every machine.

    Args:
        command: of a replica; `ADDRESS` in it becomes its machine's address.
        environment: added to that of the actor.
        cpus, gpus: what Ray is to keep free for a replica.

    Raises:
        UnavailableError: Ray is not installed.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, cpus: float = 1.0, gpus: float = 0.0
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise UnavailableError('serve: ray is missing; pip install "glm5sdk[cluster]"') from error
        self._ray = ray
        self._command, self._environment = list(command), dict(environment or {})
        if not ray.is_initialized():
            ray.init(include_dashboard=False, logging_level="warning", log_to_driver=True)
        # Two calls at a time: one waits for the process, the other one ends it.
        self._actor = ray.remote(num_cpus=cpus, num_gpus=gpus, max_concurrency=2, max_restarts=0)(Host)

    @asynccontextmanager
    async def group(self, size: int) -> AsyncIterator[Start]:
        """See `Launcher.group`."""
        meeting = ""

        async def start(rank: int) -> tuple[Member, asyncio.Task[str]]:
            nonlocal meeting
            host = self._actor.remote()
            try:
                if size > 1 and rank == 0:
                    meeting = await host.meeting.remote()
                place = {EP_RANK: str(rank), EP_SIZE: str(size), EP_MEETING: meeting} if size > 1 else {}
                pid = await host.start.remote(self._command, {**self._environment, **place})
            except BaseException:
                self._ray.kill(host)
                raise
            member = _RayMember(self._ray, host, pid)
            return member, asyncio.create_task(member.url())

        yield start


class Host:
    """The actor's side."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: Any = None

    def meeting(self) -> str:
        """A place on this machine where a group can meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{_address()}:{probe.getsockname()[1]}"

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start the process; its number."""
        read, write = os.pipe()
        filled = [word.replace(ADDRESS, _address()) for word in command]
        try:
            self._process = subprocess.Popen(
                filled, env={**os.environ, **environment, READY_FD: str(write)}, pass_fds=(write,),
                start_new_session=True, preexec_fn=die_with_parent(),
            )  # fmt: skip
        finally:
            os.close(write)
        self._ready = os.fdopen(read, "rb")
        return self._process.pid

    def url(self) -> str:
        """What the process says when it serves; empty when it ends before."""
        with self._ready as pipe:
            line = pipe.readline(4096)
        return line.decode("utf-8", "replace").strip() if line.endswith(b"\n") else ""

    def wait(self) -> int:
        """Until the process has ended; its status."""
        return self._process.wait() if self._process is not None else 0

    def send_signal(self, number: int) -> None:
        """Pass a signal on."""
        if self._process is not None:
            self._process.send_signal(number)


class _RayMember:
    """A `Member` whose process an actor holds."""

    def __init__(self, ray: Any, host: Any, pid: int) -> None:
        self._ray, self._host, self.pid = ray, host, pid
        self.returncode: int | None = None
        self._ended: asyncio.Task[int] | None = None

    async def url(self) -> str:
        try:
            url = await self._host.url.remote()
        except self._ray.exceptions.RayError:
            return ""
        self._ended = self._ended or asyncio.create_task(self._wait())
        return url

    async def wait(self) -> int:
        self._ended = self._ended or asyncio.create_task(self._wait())
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        if number == signal.SIGKILL:
            self._ray.kill(self._host)
        else:
            self._host.send_signal.remote(number)

    async def _wait(self) -> int:
        try:
            self.returncode = await self._host.wait.remote()
        except self._ray.exceptions.RayError:  # the actor, its machine, or we ourselves have ended it
            self.returncode = -signal.SIGKILL
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._host)
        return self.returncode


def _address() -> str:
    import ray

    return ray.util.get_node_ip_address()
