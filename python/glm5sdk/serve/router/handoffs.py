"""Handoffs: carries out what `Handoff` decides, over HTTP, before a request goes to its replica.

Two uses. A session that changes replicas brings its prefix along (`migrate`). Or prompts are computed on replicas of
their own and only then decoded elsewhere (`prefill`). Whatever fails here is counted and costs time, no more: the
replica that answers computes what it was not given.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from glm5sdk.core.log import get_logger
from glm5sdk.serve.router.choose import Choice, Chooser
from glm5sdk.serve.router.handoff import Action, Do, Handoff, Outcome, State
from glm5sdk.serve.router.metrics import RouterMetrics
from glm5sdk.serve.router.replicas import Replica
from glm5sdk.serve.router.request import RoutedRequest
from glm5sdk.serve.router.settings import RouterSettings
from glm5sdk.serve.router.watch import Watcher

__all__ = ["Handoffs"]

log = get_logger("serve.router")

MOVABLE = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
LOOK_SECONDS = 0.5  # between looks at whether the source is still believed to be up
ENOUGH = 0.9  # a replica that has so much of a prompt already is sent nothing


@dataclass(frozen=True)
class _Plan:
    kind: str
    source: Replica
    handoff: Handoff
    choice: Choice | None = None  # among the prefill replicas


class Handoffs:
    """The transport of prefixes.

    Args:
        settings: timeouts and the key.
        chooser: of the replicas that answer.
        metrics: counts.
        client: an httpx.AsyncClient.
        prefill: chooser and watcher of the replicas that compute prompts, where there are any.
    """

    def __init__(
        self, settings: RouterSettings, chooser: Chooser, metrics: RouterMetrics, client: Any,
        prefill: tuple[Chooser, Watcher] | None = None,
    ) -> None:  # fmt: skip
        self._settings, self._chooser, self._metrics, self._client = settings, chooser, metrics, client
        self._prefill = prefill
        self._clock = chooser.fleet.clock
        self._rest: set[asyncio.Task[None]] = set()
        self._headers = {"authorization": f"Bearer {settings.admin_key}"}

    async def prepare(self, request: RoutedRequest, choice: Choice, target: Replica) -> None:
        """Bring the request's prefix to the replica, if somebody else has it or is to compute it."""
        plan = self._plan(request, choice, target)
        if plan is None:
            return
        with _busy(plan.source):
            await self._drive(plan, request)
        outcome = plan.handoff.outcome or Outcome.FAILED
        self._metrics.handoffs.labels(plan.kind, outcome.value).inc()
        if outcome is Outcome.MOVED and plan.choice is not None and self._prefill is not None:
            self._prefill[0].sent(plan.choice, plan.source)
        if outcome in (Outcome.FAILED, Outcome.TIMEOUT):
            log.warning("%s from %s to %s: %s", plan.kind, plan.source.url, target.url, plan.handoff.reason)

    async def close(self) -> None:
        """Wait until the leases still held are released, for a moment."""
        if self._rest:
            await asyncio.wait(self._rest, timeout=2.0)
        for task in self._rest:
            task.cancel()

    def _plan(self, request: RoutedRequest, choice: Choice, target: Replica) -> _Plan | None:
        here = choice.matched.get(target.url, 0.0)
        if request.path not in MOVABLE or request.response_id or not choice.chain or here >= ENOUGH:
            return None
        ttl = self._settings.lease_ttl
        owner = choice.owner
        if self._settings.migrate and owner is not None and owner.replica != target.url:
            source = self._chooser.fleet.get(owner.replica)
            if source is not None and source.health.up and choice.matched.get(owner.replica, 1.0) > here:
                handoff = Handoff(
                    source.url, target.url, timeout=self._settings.handoff_timeout, ttl=ttl, session=request.session,
                    owners=self._chooser.owners, expected=owner,
                )  # fmt: skip
                return _Plan("migrate", source, handoff)
        if self._prefill is not None:
            among = self._prefill[0].choose(request)
            if among.replicas:
                source = among.replicas[0]
                timeout = self._settings.prefill_timeout
                return _Plan("prefill", source, Handoff(source.url, target.url, timeout=timeout, ttl=ttl), among)
            self._metrics.handoffs.labels("prefill", "no_replica").inc()
        return None

    async def _drive(self, plan: _Plan, request: RoutedRequest) -> None:
        """Until it is decided; what is left, the release, goes on behind the request's back."""
        handoff = plan.handoff
        running: set[asyncio.Task[list[Action]]] = set()
        health, ejections = plan.source.health, plan.source.health.ejections
        actions = handoff.start(self._clock())
        try:
            while not handoff.settled:
                running |= self._spawn(actions, plan, request)
                wait = min(max(0.0, handoff.next_tick() - self._clock()), LOOK_SECONDS)
                done, running = await asyncio.wait(running, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                actions = [action for task in done for action in task.result()]
                actions += handoff.tick(self._clock())
                if health.ejections != ejections:  # it hangs, or its machine is gone without a word
                    actions += handoff.failed(f"the source was taken for dead: {health.reason}", self._clock())
        except asyncio.CancelledError:
            actions = handoff.cancel(self._clock())
            self._metrics.handoffs.labels(plan.kind, Outcome.CANCELLED.value).inc()
            raise
        finally:
            # A prompt that is still being computed for nobody ends with its connection.
            for task in running:
                task.cancel()
            if handoff.state is not State.DONE:
                rest = asyncio.create_task(self._finish(actions, plan, request))
                self._rest.add(rest)
                rest.add_done_callback(self._rest.discard)

    async def _finish(self, actions: list[Action], plan: _Plan, request: RoutedRequest) -> None:
        running: set[asyncio.Task[list[Action]]] = set()
        while plan.handoff.state is not State.DONE:
            running |= self._spawn(actions, plan, request)
            wait = max(0.01, plan.handoff.next_tick() - self._clock())
            if running:
                done, running = await asyncio.wait(running, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            else:
                done = set()
                await asyncio.sleep(wait)
            actions = [action for task in done for action in task.result()]
            actions += plan.handoff.tick(self._clock())

    def _spawn(
        self, actions: Iterable[Action], plan: _Plan, request: RoutedRequest
    ) -> set[asyncio.Task[list[Action]]]:  # fmt: skip
        return {asyncio.create_task(self._do(action, plan, request)) for action in actions}

    async def _do(self, action: Action, plan: _Plan, request: RoutedRequest) -> list[Action]:
        """Send one action; what its answer leads to."""
        handoff, ttl = plan.handoff, self._settings.lease_ttl
        body: dict[str, Any] = {"lease_id": action.lease, "seconds": ttl}
        if action.do is Do.EXPORT:
            body = {"path": request.path, "request": request.body, "prefill": plan.kind == "prefill", "seconds": ttl}
        elif action.do is Do.IMPORT:
            body = {"source": plan.source.url, "lease_id": action.lease}
        answer, problem = await self._post(f"{action.at}/admin/kv/{action.do.value}", body)
        now = self._clock()
        if action.do is Do.RELEASE:
            return handoff.released(action.lease) if answer is not None else []
        if answer is None:
            # Only what was sent to the source says something of it; an import goes to the target.
            at_source = plan.kind == "prefill" and action.at == plan.source.url
            if self._prefill is not None and at_source and problem.startswith("Connect"):
                self._prefill[1].unreachable(plan.source, problem)
            return handoff.failed(f"{action.do.value}: {problem}", now)
        if action.do is Do.EXPORT:
            self._metrics.handoff_bytes.labels(plan.kind).inc(answer.get("bytes") or 0)
            return handoff.exported(answer.get("lease_id") or "", int(answer.get("rows") or 0), now)
        if action.do is Do.IMPORT:
            rows = int(answer.get("rows") or 0)
            return handoff.imported(rows, now) if rows else handoff.failed("import: no free pages", now)
        return handoff.renewed(now) if answer.get("renewed") else handoff.failed("renew: the lease has ended", now)

    async def _post(self, url: str, body: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
        import httpx
        import msgspec

        try:
            answer = await self._client.post(
                url, content=msgspec.json.encode(body), headers={**self._headers, "content-type": "application/json"}
            )
            said = msgspec.json.decode(answer.content)
        except httpx.HTTPError as error:
            return None, f"{type(error).__name__}: {error}"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return None, f"no JSON: {error}"
        if answer.status_code != 200 or not isinstance(said, dict):
            return None, f"status {answer.status_code}: {answer.text[:200]}"
        return said, ""


@contextlib.contextmanager
def _busy(replica: Replica) -> Iterator[None]:
    replica.in_flight += 1
    try:
        yield
    finally:
        replica.in_flight -= 1
