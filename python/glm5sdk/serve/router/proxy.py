"""Proxy: one request in, tried on the replicas of its choice, one answer out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from glm5sdk.core.log import get_logger
from glm5sdk.serve.router.budget import RetryBudget
from glm5sdk.serve.router.choose import Choice, Chooser
from glm5sdk.serve.router.errors import RouteError, error_body
from glm5sdk.serve.router.keys import need_key
from glm5sdk.serve.router.metrics import RouterMetrics
from glm5sdk.serve.router.relay import HOP_HEADERS, BrokenStream, relay, send_whole
from glm5sdk.serve.router.replicas import Replica
from glm5sdk.serve.router.request import RoutedRequest, read_request
from glm5sdk.serve.router.settings import RouterSettings
from glm5sdk.serve.router.watch import Watcher

__all__ = ["Proxy"]

log = get_logger("serve.router")

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BUSY_AT_MOST = 5.0  # seconds that a replica's own Retry-After keeps others away from it
NOT_SENT_ON = HOP_HEADERS | {b"host", b"accept-encoding", b"expect"}


@dataclass
class _Refusal:
    """One replica would not or could not; another one may."""

    reason: str
    status: int = 503
    headers: list[tuple[bytes, bytes]] | None = None
    body: bytes = b""
    retry_after: float = 1.0


class Proxy:
    """An ASGI application for the replicas' routes.

    Before anything of an answer has reached the client, a connect error, a 429 or a 503 sends the request to the next
    replica, within the retry budget. Anything else is told to the client. A client that goes away closes its
    connection to the replica at once, which aborts the request there.
    """

    def __init__(
        self, settings: RouterSettings, chooser: Chooser, watcher: Watcher, metrics: RouterMetrics, client: Any,
        prepare: Callable[[RoutedRequest, Choice, Replica], Awaitable[None]] | None = None,
    ) -> None:  # fmt: skip
        """Serve.

        Args:
            settings: limits and keys.
            chooser: who gets what.
            watcher: is told of replicas that fail.
            metrics: counts.
            client: an httpx.AsyncClient.
            prepare: runs before a request is sent to a replica, to move its prefix there; may fail silently.
        """
        self._settings, self._chooser, self._watcher = settings, chooser, watcher
        self._metrics, self._client, self._prepare = metrics, client, prepare
        self._budget = RetryBudget(clock=chooser.fleet.clock)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        path = scope["path"]
        try:
            headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in scope["headers"]}
            # The chat page holds nothing but the form to type a key in, and a browser's preflight carries none.
            if path != "/" and scope["method"] != "OPTIONS":
                need_key(headers, self._settings.api_keys)
            if any(part in (".", "..") for part in path.split("/")):
                raise RouteError(400, "the path has dot segments", "bad_path")
            try:
                async with asyncio.timeout(self._settings.body_timeout):
                    raw = await self._body(receive, headers)
            except TimeoutError:
                raise RouteError(408, "the body took too long to arrive", "body_timeout") from None
            if raw is None:
                return
            request = read_request(path, headers, raw)
            await self._until_gone(receive, self._serve(scope, request, raw, send))
        except RouteError as error:
            await self._refuse(send, path, error)

    async def _body(self, receive: Receive, headers: dict[str, str]) -> bytes | None:
        most = self._settings.max_body_bytes
        declared = headers.get("content-length", "")
        body = bytearray()
        too_large = declared.isdecimal() and int(declared[:20]) > most
        while not too_large:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            too_large = len(body) > most
            if not message.get("more_body", False):
                break
        if too_large:
            raise RouteError(413, f"the body is over {most} bytes", "request_too_large")
        return bytes(body)

    async def _until_gone(self, receive: Receive, serve: Any) -> None:
        """Serve, but stop at once when the client goes away."""
        work = asyncio.ensure_future(serve)
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._metrics.aborted.inc()
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work
            else:
                await work
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _serve(self, scope: MutableMapping[str, Any], request: RoutedRequest, raw: bytes, send: Send) -> None:
        self._budget.deposit()
        choice = self._chooser.choose(request)
        if not choice.replicas:
            raise RouteError(503, "no replica is up", "no_replica", retry_after=1.0)
        refusals: list[_Refusal] = []
        for replica in choice.replicas:
            if replica.in_flight >= self._settings.max_in_flight:
                refusals.append(_Refusal("full", 429))
                continue
            if (tried := [r for r in refusals if r.reason != "full"]) and not self._may_retry(tried):
                break
            refusal = await self._attempt(scope, request, raw, choice, replica, send)
            if refusal is None:
                return
            refusals.append(refusal)
        await self._give_up(send, refusals)

    def _may_retry(self, tried: list[_Refusal]) -> bool:
        if len(tried) > self._settings.max_retries:
            return False
        if not self._budget.withdraw():
            self._metrics.no_budget.inc()
            return False
        self._metrics.retries.labels(tried[-1].reason).inc()
        return True

    async def _give_up(self, send: Send, refusals: list[_Refusal]) -> None:
        wait = min(r.retry_after for r in refusals)
        if all(r.status == 429 for r in refusals):
            raise RouteError(429, "all replicas are full", "overloaded", retry_after=wait)
        own = [r for r in refusals if r.headers is not None]
        if len(refusals) == 1 and own:  # the only one there is says it best itself
            self._metrics.refused.labels(str(own[0].status)).inc()
            await send_whole(send, own[0].status, own[0].headers or [], own[0].body)
            return
        words = ", ".join(r.reason for r in refusals)
        raise RouteError(503, f"no replica took the request ({words})", "no_replica", retry_after=wait)

    async def _attempt(
        self, scope: MutableMapping[str, Any], request: RoutedRequest, raw: bytes, choice: Choice, replica: Replica,
        send: Send,
    ) -> _Refusal | None:  # fmt: skip
        import httpx

        clock, begun = self._chooser.fleet.clock, self._chooser.fleet.clock()
        with _running(replica):
            if self._prepare is not None:
                await self._prepare(request, choice, replica)
            self._chooser.sent(choice, replica)
            try:
                answer = await self._client.send(self._outgoing(scope, replica, raw), stream=True)
            except httpx.InvalidURL as error:
                raise RouteError(400, f"the path is no path: {error}", "bad_path") from error
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                self._watcher.unreachable(replica, f"{type(error).__name__}: {error}")
                return _Refusal("connect")
            except httpx.TransportError as error:
                self._watcher.suspect(replica)
                words = str(error) or type(error).__name__
                raise RouteError(502, f"the replica was lost before it answered: {words}", "replica_lost") from error
            try:
                self._metrics.requests.labels(replica.url, str(answer.status_code)).inc()
                if answer.status_code in (429, 503):
                    return await self._refusal(answer, replica)
                self._metrics.first.labels(replica.url).observe(clock() - begun)
                self._note(request, choice, replica)
                extra = [(b"x-glm5-replica", replica.url.encode())]
                await relay(answer, request.path, send, extra, lambda name: self._chooser.made(name, replica))
            except BrokenStream as error:
                self._metrics.broken.labels(replica.url).inc()
                self._watcher.suspect(replica)
                log.warning("replica %s: %s", replica.url, error)
            except RouteError:
                self._watcher.suspect(replica)
                raise
            finally:
                await answer.aclose()
                self._metrics.whole.labels(replica.url).observe(clock() - begun)
        return None

    def _note(self, request: RoutedRequest, choice: Choice, replica: Replica) -> None:
        self._chooser.accepted(request, choice, replica)
        if request.prompt:
            matched = choice.matched.get(replica.url, 0.0)
            self._metrics.matched.observe(matched)
            if matched >= self._chooser.affinity.least:
                self._metrics.hits.labels(replica.url).inc()

    async def _refusal(self, answer: Any, replica: Replica) -> _Refusal:
        import httpx

        after = _seconds(answer.headers.get("retry-after"))
        replica.busy_until = self._chooser.fleet.clock() + min(after, BUSY_AT_MOST)
        if answer.status_code == 503:  # it may be shutting down
            self._watcher.suspect(replica)
        headers = [(n.lower(), v) for n, v in answer.headers.raw if n.lower() not in HOP_HEADERS]
        try:
            body = await answer.aread()
        except httpx.TransportError:
            return _Refusal(str(answer.status_code), answer.status_code, retry_after=after)
        headers.append((b"content-length", str(len(body)).encode()))
        return _Refusal(str(answer.status_code), answer.status_code, headers, body, after)

    def _outgoing(self, scope: MutableMapping[str, Any], replica: Replica, raw: bytes) -> Any:
        import httpx

        target = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        if query := scope.get("query_string"):
            target += "?" + query.decode("latin-1")
        headers = [(n, v) for n, v in scope["headers"] if n not in NOT_SENT_ON]
        if scope.get("client"):
            headers.append((b"x-forwarded-for", str(scope["client"][0]).encode()))
        timeout = httpx.Timeout(
            self._settings.read_timeout, connect=self._settings.connect_timeout, pool=None
        ).as_dict()  # fmt: skip
        return httpx.Request(
            scope["method"], replica.url + target, headers=headers, content=raw, extensions={"timeout": timeout}
        )

    async def _refuse(self, send: Send, path: str, error: RouteError) -> None:
        import msgspec

        self._metrics.refused.labels(str(error.status)).inc()
        headers = [(b"content-type", b"application/json")]
        if error.retry_after is not None:
            headers.append((b"retry-after", str(max(1, round(error.retry_after))).encode()))
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        body = msgspec.json.encode(error_body(path, error.status, error.message, error.code))
        await send_whole(send, error.status, [*headers, (b"content-length", str(len(body)).encode())], body)


@contextlib.contextmanager
def _running(replica: Replica) -> Iterator[None]:
    replica.in_flight += 1
    try:
        yield
    finally:
        replica.in_flight -= 1


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _seconds(text: str | None) -> float:
    try:
        return min(max(float(text or ""), 0.0), 3600.0)
    except ValueError:
        return 1.0
