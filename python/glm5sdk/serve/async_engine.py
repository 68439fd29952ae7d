"""AsyncEngine: an engine in a thread of its own, for event loops."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any

from glm5sdk.core.errors import UnavailableError
from glm5sdk.core.log import get_logger
from glm5sdk.serve.engine import Engine
from glm5sdk.serve.interface import EngineStats
from glm5sdk.serve.outputs import Delta
from glm5sdk.serve.params import SamplingParams

__all__ = ["AsyncEngine"]

_log = get_logger("serve")
NAP_SECONDS = 0.01  # between looks at a queue that waits for company, or at leases that run out


class AsyncEngine:
    """An `EngineClient` over an `Engine`, which from now on belongs to this object's thread.

    Args:
        engine: not to be touched by anybody else.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.info = engine.info
        self._stats = engine.stats()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._readers: dict[str, _Reader] = {}
        self._failure: str | None = None
        self._closed = False
        self._gate = threading.Lock()
        context = copy_context()  # a thread starts without the backend choice of the one that made it
        self._thread = threading.Thread(target=context.run, args=(self._loop,), name="glm5-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> AsyncIterator[Delta]:
        """See `EngineClient.generate`."""
        reader = _Reader(asyncio.get_running_loop(), params.n)
        guide = None
        if params.structured is not None:  # beside the running steps
            guide = await asyncio.to_thread(self.engine.intake.guide, params)

        def add() -> None:
            self.engine.add(
                request_id, prompt_token_ids, params, priority=priority, cache_salt=cache_salt, adapter=adapter,
                guide=guide,
            )  # fmt: skip
            self._readers[request_id] = reader

        added = self._submit(add)
        try:
            await asyncio.wrap_future(added)
            while reader.open:
                for delta in await reader.take():
                    yield delta
        finally:
            # Also when the reader went away before `add` was heard of: the jobs are done in order.
            if reader.open and not (added.done() and not added.cancelled() and added.exception()):
                self._submit(lambda: self._abort(request_id, reader))

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        await asyncio.wrap_future(self._submit(lambda: self.engine.abort(request_id)))

    def stats(self) -> EngineStats:
        """See `EngineClient.stats`; as of the end of the last step."""
        return self._stats

    async def control(self, command: str, arguments: Mapping[str, Any]) -> Any:
        """See `EngineClient.control`."""
        control = self.engine.control
        # Checkpoints are read beside the running steps; what they change is changed between two.
        second_half = await asyncio.to_thread(control.prepare, command, dict(arguments))

        def finish() -> Any:
            try:
                return control.finish(second_half)
            finally:
                self._stats = self.engine.stats()  # who asks after the command is answered sees what it did

        return await asyncio.wrap_future(self._submit(finish))

    @property
    def failure(self) -> str | None:
        """Why the engine stopped working, None while it works."""
        return self._failure

    def close(self, timeout: float = 10.0) -> None:
        """Abort what is left and end the thread."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join(timeout)

    def _submit(self, job: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        with self._gate:
            if self._failure is None and not self._closed:
                self._jobs.put((job, done))
                return done
        done.set_exception(UnavailableError(f"engine: it has stopped: {self._failure or 'it was closed'}"))
        return done

    def _abort(self, request_id: str, reader: _Reader) -> None:
        if self._readers.get(request_id) is reader:
            del self._readers[request_id]
            self.engine.abort(request_id)

    def _loop(self) -> None:
        try:
            while self._do_jobs():
                if self.engine.has_work():
                    self._deliver(self.engine.step())
                self.engine.leases.expire()
                self._stats = self.engine.stats()
        except BaseException as error:  # noqa: BLE001 - whatever it was, nobody may be left waiting
            _log.exception("the engine's thread failed")
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._end()

    def _do_jobs(self) -> bool:
        """Do what was asked for; sleep when there is nothing else. False when it is time to end."""
        waits = self.engine.has_work() or len(self.engine.leases) > 0
        timeout = 0.0 if self.engine.busy else NAP_SECONDS if waits else None
        while True:
            try:
                job = self._jobs.get(timeout != 0.0, timeout)
            except queue.Empty:
                return True
            if job is None:
                return False
            _fulfil(*job)
            timeout = 0.0

    def _deliver(self, deltas: list[Delta]) -> None:
        by_reader: dict[_Reader, list[Delta]] = {}
        for delta in deltas:
            reader = self._readers.get(delta.request_id)
            if reader is not None:
                by_reader.setdefault(reader, []).append(delta)
        for reader, part in by_reader.items():
            if not reader.put(part):
                self._readers.pop(part[0].request_id, None)

    def _end(self) -> None:
        """Nobody is left waiting: neither for a job, nor for a delta."""
        reason = self._failure or "the engine was closed"
        try:
            self.engine.close()
        except Exception:  # noqa: BLE001 - logged; the readers below must hear of the end in any case
            _log.exception("closing the engine failed")
        for request_id, reader in self._readers.items():
            reader.put([Delta(request_id, i, finish_reason="error", error=reason) for i in range(reader.sequences)])
        with self._gate:  # from here on no job can come in that nobody would look at
            self._closed = True
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                job[1].set_exception(UnavailableError(f"engine: it has stopped: {reason}"))


class _Reader:
    """Deltas of one request on their way from the engine's thread to an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sequences: int) -> None:
        self.sequences = sequences
        self._loop, self._left = loop, set(range(sequences))  # _left belongs to the engine's thread
        self._arrived: list[Delta] = []
        self._event = asyncio.Event()
        self._whole = False  # the last delta has arrived, but may not be taken yet
        self.open = True

    def put(self, deltas: list[Delta]) -> bool:
        """From the engine's thread. False when nothing more will come, or nobody listens."""
        self._left -= {d.index for d in deltas if d.finish_reason}
        try:
            self._loop.call_soon_threadsafe(self._arrive, deltas, not self._left)
        except RuntimeError:  # the loop is closed
            return False
        return bool(self._left)

    async def take(self) -> list[Delta]:
        """What has arrived since the last call; waits for something. With the last delta `open` becomes False."""
        await self._event.wait()
        self._event.clear()
        arrived, self._arrived = self._arrived, []
        self.open = not self._whole
        return arrived

    def _arrive(self, deltas: list[Delta], last: bool) -> None:
        self._arrived += deltas
        self._whole = last
        self._event.set()


def _fulfil(job: Callable[[], Any], done: Future[Any]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(job())
    except Exception as error:  # noqa: BLE001 - the future carries it to whoever waits
        done.set_exception(error)
