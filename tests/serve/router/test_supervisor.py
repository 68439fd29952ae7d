"""The supervisor with small processes: ready, restarted, stopped, and none left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from glm5sdk.core.errors import ContractError, UnavailableError
from glm5sdk.serve.ready import EP_MEETING, EP_RANK, EP_SIZE, READY_FD, announce, expert_group
from glm5sdk.serve.router.launch import LocalLauncher
from glm5sdk.serve.router.supervisor import Restarts, Supervisor

FAST = Restarts(first=0.05, longest=0.2, stable=60.0, kill_after=3.0)
CHILD = f"""
import os, sys, time
where = "{{}}/{{}}/{{}}".format(os.getpid(), os.environ.get("{EP_RANK}"), os.environ.get("{EP_SIZE}"))
os.write(int(os.environ["{READY_FD}"]), ("http://" + where + "\\n").encode())
os.close(int(os.environ["{READY_FD}"]))
"""
SLEEPS = CHILD + "time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPS


class World:
    """Who is up."""

    def __init__(self) -> None:
        self.up: list[str] = []
        self.ever = 0

    def add(self, url: str) -> None:
        self.up.append(url)
        self.ever += 1

    async def remove(self, url: str) -> None:
        self.up.remove(url)

    def supervisor(self, code: str, groups: int, size: int, restarts: Restarts = FAST) -> Supervisor:
        launcher = LocalLauncher([sys.executable, "-c", code])
        return Supervisor(launcher, groups, size, up=self.add, down=self.remove, restarts=restarts)


def alive(pid: int) -> bool:
    """Running, and not a zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def test_groups_start_restart_whole_and_stop() -> None:
    async def run() -> None:
        world = World()
        supervisor = world.supervisor(SLEEPS, 2, 2)
        task = asyncio.create_task(supervisor.run())
        await until(lambda: len(world.up) == 4)
        assert sorted(url.split("/", 3)[3] for url in world.up) == ["0/2", "0/2", "1/2", "1/2"]
        before, pids = list(world.up), supervisor.pids
        victim = int(before[0].split("/")[2])
        os.kill(victim, signal.SIGKILL)
        await until(lambda: world.ever == 6 and len(world.up) == 4)
        kept = set(before) & set(world.up)
        assert len(kept) == 2  # the other group did not notice
        assert sum(alive(pid) for pid in pids) == 2  # the victim's partner was ended with it
        assert supervisor.restarted == 1
        now = supervisor.pids
        await supervisor.stop()
        await task
        assert not world.up
        assert not any(alive(pid) for pid in now)

    asyncio.run(run())


def test_one_that_will_not_end_is_ended() -> None:
    async def run() -> None:
        world = World()
        supervisor = world.supervisor(STUBBORN, 1, 1, Restarts(kill_after=0.3))
        task = asyncio.create_task(supervisor.run())
        await until(lambda: len(world.up) == 1)
        begun = time.monotonic()
        await supervisor.stop()
        await task
        assert 0.25 < time.monotonic() - begun < 5

    asyncio.run(run())


SILENT = f"import os, time; os.close(int(os.environ['{READY_FD}'])); time.sleep(60)"


@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", SILENT])
def test_one_that_never_serves_is_an_error_at_once(code: str) -> None:
    async def run() -> None:
        world = World()
        supervisor = world.supervisor(code, 2, 1)
        with pytest.raises(UnavailableError, match="before it served"):
            await asyncio.wait_for(supervisor.run(), 10)
        assert not supervisor.pids
        assert world.ever == 0

    asyncio.run(run())


def test_crashes_are_spaced() -> None:
    async def run() -> None:
        world = World()
        supervisor = world.supervisor(CHILD, 1, 1, Restarts(first=0.05, longest=0.4))
        task = asyncio.create_task(supervisor.run())
        begun = time.monotonic()
        await until(lambda: world.ever == 4)
        assert time.monotonic() - begun > 0.05 + 0.1 + 0.2
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert not supervisor.pids

    asyncio.run(run())


def test_delays() -> None:
    restarts = Restarts(first=1, longest=10)
    assert [restarts.delay(n) for n in (1, 2, 3, 4, 5, 1000)] == [1, 2, 4, 8, 10, 10]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for a signal at the parent's death")
def test_no_orphan_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio, sys
        from glm5sdk.serve.router.launch import LocalLauncher
        from glm5sdk.serve.router.supervisor import Supervisor
        async def down(url): pass
        def up(url): print(url, flush=True)
        code = {SLEEPS!r}
        asyncio.run(Supervisor(LocalLauncher([sys.executable, "-c", code]), 2, 1, up=up, down=down).run())
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline().split("/")[2]) for _ in range(2)]
    assert all(alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in pids)


def test_announcing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(READY_FD, raising=False)
    assert not announce("http://a:1")
    read, write = os.pipe()
    monkeypatch.setenv(READY_FD, str(write))
    assert announce("http://a:1")
    assert not announce("http://a:1")  # once: the descriptor is closed
    with os.fdopen(read) as pipe:
        assert pipe.read() == "http://a:1\n"


def test_expert_groups_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (EP_RANK, EP_SIZE, EP_MEETING):
        monkeypatch.delenv(name, raising=False)
    assert expert_group() is None
    for name, value in ((EP_RANK, "1"), (EP_SIZE, "2"), (EP_MEETING, "file:///x")):
        monkeypatch.setenv(name, value)
    group = expert_group()
    assert group is not None and (group.rank, group.size, group.meeting) == (1, 2, "file:///x")
    for name, value in ((EP_RANK, "2"), (EP_RANK, "-1"), (EP_SIZE, "x"), (EP_MEETING, "")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(ContractError):
                expert_group()
