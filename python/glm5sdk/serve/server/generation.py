"""Requests in the engine: measured, admitted, merged, collected, and always ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from glm5sdk.serve.interface import OverloadedError
from glm5sdk.serve.outputs import Delta, RequestOutput
from glm5sdk.serve.params import SamplingParams
from glm5sdk.serve.server.errors import ApiError
from glm5sdk.serve.server.service import Service

__all__ = ["Job", "PrimedDeltas", "collect", "deltas", "header_text", "headers_of", "primed", "usage_of"]


@dataclass(frozen=True)
class Job:
    """One prompt for the engine; fields as in `EngineClient.generate`."""

    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    adapter: str | None = None
    prompt: str | None = None


def check_length(job: Job, service: Service) -> None:
    """Refuse what cannot fit, in the words that clients look for.

    Raises:
        ApiError: 400.
    """
    length, most = len(job.prompt_token_ids), service.engine.info.max_model_len
    if not length:
        raise ApiError(400, "prompt: length is 0 tokens, needs at least 1", param="prompt", code="empty_prompt")
    vocab = service.engine.info.vocab_size
    if bad := [token for token in job.prompt_token_ids if not 0 <= token < vocab]:
        raise ApiError(400, f"prompt: token id is {bad[0]}, needs 0 to {vocab - 1}", param="prompt")
    new = job.params.max_tokens or 1
    if length + new > most:
        raise ApiError(
            400,
            f"prompt: length is {length} tokens and {new} more were asked for, needs at most {most} together: this "
            f"model's maximum context length is {most} tokens",
            param="max_tokens" if length < most else "prompt",
            code="context_length_exceeded",
        )


async def deltas(service: Service, answer_id: str, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Delta], None]:
    """(index of the job, delta) of all jobs as they come. Closing it ends what still runs.

    Raises:
        ApiError: a request failed in the engine.
        ContractError, CapacityError, OverloadedError: see `EngineClient.generate`.
    """
    for job in jobs:
        check_length(job, service)
    if answer_id in service.alive:
        raise ApiError(400, f"request id: {answer_id!r} is in use, needs one that is not", param="request_id")
    names = tuple(f"{answer_id}-{index}" if len(jobs) > 1 else answer_id for index in range(len(jobs)))
    service.alive[answer_id] = names
    try:
        sequences = sum(job.params.n for job in jobs)
        try:
            ticket = service.admission.enter(sequences, sum(len(job.prompt_token_ids) for job in jobs))
        except OverloadedError:
            service.metrics.refused.inc()
            raise
        with ticket:
            if len(jobs) == 1:
                source: AsyncGenerator[tuple[int, Delta], None] = _numbered(_one(service, names[0], jobs[0]), 0)
            else:
                source = _merged([_one(service, name, job) for name, job in zip(names, jobs, strict=True)])
            async with aclosing(source):
                async for item in source:
                    ticket.started()
                    yield item
    finally:
        del service.alive[answer_id]


async def _one(service: Service, name: str, job: Job) -> AsyncGenerator[Delta, None]:
    """One job's deltas, measured."""
    metrics, begin = service.metrics, time.monotonic()
    latest: dict[int, float] = {}
    made, open_sequences = 0, job.params.n
    source = service.engine.generate(
        job.prompt_token_ids,
        job.params,
        request_id=name,
        priority=job.priority,
        cache_salt=job.cache_salt,
        adapter=job.adapter,
    )
    try:
        async for delta in source:
            now = time.monotonic()
            if not latest:
                metrics.prompt_tokens.observe(len(job.prompt_token_ids))
                metrics.first_token.observe(now - begin)
                metrics.queue.observe(now - begin if delta.queue_seconds is None else delta.queue_seconds)
            if delta.index in latest and delta.token_ids:
                for _ in delta.token_ids:
                    metrics.inter_token.observe((now - latest[delta.index]) / len(delta.token_ids))
            latest[delta.index] = now
            made += len(delta.token_ids)
            if delta.finish_reason is not None:
                metrics.finished.labels(delta.finish_reason).inc()
                open_sequences -= 1
            if delta.finish_reason == "error":
                raise _failure(delta.error)
            yield delta
        metrics.whole.observe(time.monotonic() - begin)
        metrics.generation_tokens.observe(made)
    except OverloadedError:
        metrics.refused.inc()
        open_sequences = 0
        raise
    finally:
        await _closed(source)  # which ends what still runs
        if open_sequences > 0:
            metrics.hung_up.inc()


def _failure(error: str | None) -> ApiError:
    """A grammar whose state outgrows its limits while it is followed was the client's choice; all else is our fault."""
    if error is not None and error.startswith("structured output:"):
        return ApiError(400, error, param="response_format", code="structured_output_failed")
    return ApiError(500, error or "the engine failed on this request", code="engine_error")


async def _numbered(source: AsyncGenerator[Delta, None], index: int) -> AsyncGenerator[tuple[int, Delta], None]:
    async with aclosing(source):
        async for delta in source:
            yield index, delta


async def _merged(sources: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[tuple[int, Delta], None]:
    """All sources at once; the first failure ends them all."""
    queue: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue()

    async def pump(index: int, source: AsyncGenerator[Delta, None]) -> None:
        try:
            async with aclosing(source):
                async for delta in source:
                    queue.put_nowait((index, delta))
            queue.put_nowait((index, None))
        except Exception as error:  # noqa: BLE001  raised again by the reader
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(index, source)) for index, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _closed(source: AsyncIterator[Any]) -> None:
    close = getattr(source, "aclose", None)
    if close is not None:
        await close()


async def collect(service: Service, answer_id: str, jobs: Sequence[Job]) -> list[RequestOutput]:
    """Run jobs to their end.

    Raises:
        As `deltas`.
    """
    outputs = [RequestOutput.begun(answer_id, job.prompt, job.prompt_token_ids, job.params.n) for job in jobs]
    async with aclosing(deltas(service, answer_id, jobs)) as source:
        async for index, delta in source:
            outputs[index].add(delta)
    return outputs


async def primed(source: AsyncGenerator[tuple[int, Delta], None]) -> PrimedDeltas:
    """A stream whose first item has come: what goes wrong before it can still be told by an HTTP status."""
    try:
        first = await anext(source, None)
    except BaseException:
        await source.aclose()
        raise
    return PrimedDeltas(first, source)


class PrimedDeltas:
    """An async iterator of (job, delta).

    Attributes:
        first: its first item; None when there is none.
    """

    def __init__(self, first: tuple[int, Delta] | None, rest: AsyncGenerator[tuple[int, Delta], None]) -> None:
        self.first = first
        self._waits = first is not None
        self._rest = rest

    @property
    def weight_version(self) -> str:
        """Of the weights that made the first token."""
        return self.first[1].weight_version if self.first else ""

    def __aiter__(self) -> PrimedDeltas:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        if self._waits and self.first is not None:
            self._waits = False
            return self.first
        return await anext(self._rest)

    async def aclose(self) -> None:
        """End what still runs; works even when nobody began to read."""
        await self._rest.aclose()


def usage_of(prompt: int, cached: int, made: int) -> dict[str, Any]:
    """OpenAI's `usage` of chat and completions."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def headers_of(version: str, request_id: str) -> dict[str, str]:
    """Headers that every answer with generated text carries."""
    return {"x-glm5-weight-version": header_text(version), "x-request-id": header_text(request_id)}


def header_text(text: str) -> str:
    """A text as a header may carry it: printable ASCII, the rest as question marks."""
    return "".join(c if 32 <= ord(c) < 127 else "?" for c in text)
