"""Replicas as Ray actors on a cluster of this machine alone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from glm5sdk.serve.router.supervisor import Restarts, Supervisor

ray = pytest.importorskip("ray")

# A replica that serves its own environment's place, with nothing but the standard library.
CHILD = """
import http.server, json, os
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        told = [os.getpid(), os.environ.get("GLM5SDK_EP_RANK"), os.environ.get("GLM5SDK_EP_MEETING")]
        body = json.dumps(told).encode()
        self.send_response(200); self.send_header("content-length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words): pass
server = http.server.HTTPServer(("{address}", 0), Page)
os.write(int(os.environ["GLM5SDK_READY_FD"]), f"http://{address}:{{server.server_port}}\\n".encode())
os.close(int(os.environ["GLM5SDK_READY_FD"]))
server.serve_forever()
"""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, logging_level="error")
    yield
    ray.shutdown()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.full  # four actors start one after another, each a Python of its own
@pytest.mark.filterwarnings("ignore")  # ray's own
def test_groups_live_on_actors() -> None:
    from glm5sdk.serve.router.ray_replicas import RayLauncher

    async def run() -> None:
        up: list[str] = []
        ever: list[str] = []

        def add(url: str) -> None:
            up.append(url)
            ever.append(url)

        async def gone(url: str) -> None:
            up.remove(url)

        code = CHILD.replace("{{", "{").replace("}}", "}")
        launcher = RayLauncher([sys.executable, "-c", code], cpus=0.5)
        supervisor = Supervisor(launcher, 1, 2, up=add, down=gone, restarts=Restarts(first=0.1, kill_after=5.0))
        task = asyncio.create_task(supervisor.run())
        await until(lambda: len(up) == 2 or task.done())
        assert not task.done(), task.exception()
        async with httpx.AsyncClient(trust_env=False) as client:
            places = [(await client.get(url)).json() for url in up]
            assert [rank for _, rank, _ in places] == ["0", "1"]
            assert places[0][2] == places[1][2]
            assert places[0][2].startswith("tcp://")
            pids = [pid for pid, _, _ in places]
            os.kill(pids[0], signal.SIGKILL)
            await until(lambda: len(ever) == 4)
            assert not any(alive(pid) for pid in pids)
            now = [(await client.get(url)).json()[0] for url in up]
        await supervisor.stop()
        await task
        await until(lambda: not any(alive(pid) for pid in now), 10)
        assert not up

    asyncio.run(run())
