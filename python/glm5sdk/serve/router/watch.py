"""Watcher: asks every replica how it is, and tells the rest of the router when that changes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from glm5sdk.core.log import get_logger
from glm5sdk.serve.router.choose import Chooser
from glm5sdk.serve.router.metrics import RouterMetrics
from glm5sdk.serve.router.replicas import Replica

__all__ = ["Watcher"]

log = get_logger("serve.router")


class Watcher:
    """One task a replica: GET /health, and /v1/models while it is well."""

    def __init__(self, chooser: Chooser, metrics: RouterMetrics, client: Any, keys: tuple[str, ...]) -> None:
        self._chooser, self._metrics, self._client = chooser, metrics, client
        self._headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake: dict[str, asyncio.Event] = {}

    def watch(self, replica: Replica) -> None:
        """Begin with this replica."""
        self._wake[replica.url] = asyncio.Event()
        self._tasks[replica.url] = asyncio.create_task(self._run(replica))

    async def leave(self, replica: Replica) -> None:
        """Ask this one no more."""
        self._wake.pop(replica.url, None)
        if task := self._tasks.pop(replica.url, None):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def close(self) -> None:
        """Stop asking."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def unreachable(self, replica: Replica, reason: str) -> None:
        """A request could not connect: out at once, and soon asked again."""
        if replica.health.eject(reason):
            self._ejected(replica)
        self.suspect(replica)

    def suspect(self, replica: Replica) -> None:
        """Something broke there; ask now instead of at the next turn."""
        if event := self._wake.get(replica.url):
            event.set()

    async def check(self, replica: Replica) -> None:
        """Ask once, and keep what it says."""
        import httpx

        health = replica.health
        try:
            async with asyncio.timeout(health.rules.timeout):
                answer = await self._client.get(f"{replica.url}/health")
            problem = "" if answer.status_code == 200 else f"/health answers {answer.status_code}"
        except TimeoutError:
            problem = f"/health takes over {health.rules.timeout:g} s"
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            if health.failed(problem):
                self._ejected(replica)
            return
        await self._models(replica)
        if health.passed():
            self._metrics.readmissions.labels(replica.url).inc()
            log.info("replica %s is up", replica.url)

    async def _run(self, replica: Replica) -> None:
        wake = self._wake[replica.url]
        while True:
            await self.check(replica)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(replica.health.next_check()):
                    await wake.wait()
                    # Many requests may break in the same moment; one question answers them all.
                    await asyncio.sleep(replica.health.rules.first_recheck / 10)
            wake.clear()

    async def _models(self, replica: Replica) -> None:
        import httpx
        import msgspec

        try:
            async with asyncio.timeout(replica.health.rules.timeout):
                answer = await self._client.get(f"{replica.url}/v1/models", headers=self._headers)
            entries = msgspec.json.decode(answer.content).get("data") if answer.status_code == 200 else None
        except (TimeoutError, httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError, AttributeError):
            entries = None
        if isinstance(entries, list):  # else what was known before holds
            replica.models = tuple(e for e in entries if isinstance(e, dict) and isinstance(e.get("id"), str))

    def _ejected(self, replica: Replica) -> None:
        log.warning("replica %s is down: %s", replica.url, replica.health.reason)
        self._metrics.ejections.labels(replica.url).inc()
        self._chooser.lost(replica.url)
