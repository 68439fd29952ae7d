"""EngineClient: what the API server, the router and the RL loop know of an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from glm5sdk.serve.outputs import Delta
from glm5sdk.serve.params import SamplingParams

__all__ = ["EngineClient", "EngineInfo", "EngineStats", "OverloadedError"]


class OverloadedError(RuntimeError):
    """The queue is full. Ask again later.

    Attributes:
        retry_after: seconds after which there may be room.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True)
class EngineInfo:
    """What does not change while an engine lives.

    Attributes:
        max_model_len: tokens that prompt and continuation may have together.
        vocab_size: rows of the embedding.
        page_size, num_pages: of the cache.
        stop_token_ids: the model's own.
        max_num_seqs: sequences in a step at most.
        device, dtype, kv_cache_dtype: words.
        speculative_tokens: drafts a step.
    """

    max_model_len: int
    vocab_size: int
    page_size: int
    num_pages: int
    stop_token_ids: tuple[int, ...]
    max_num_seqs: int
    device: str
    dtype: str
    kv_cache_dtype: str
    speculative_tokens: int = 0


@dataclass
class EngineStats:
    """Numbers of this moment (gauges) and sums since the start (totals).

    Attributes:
        running, waiting: requests in the batch; in the queue.
        waiting_tokens: prompt tokens of the queue.
        pages_total, pages_free: of the cache. Pages that only the prefix cache holds count as free: they are given up
            when a request needs them.
        pages_cached: of the free ones, those that the prefix cache holds.
        prompt_tokens, cached_tokens, generated_tokens: totals.
        drafted_tokens, accepted_tokens: totals of speculation.
        preempted, aborted, rejected, finished: totals of requests.
        steps: totals of engine steps.
        weight_version: of the weights that new requests get.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preempted: int = 0
    aborted: int = 0
    rejected: int = 0
    finished: int = 0
    steps: int = 0
    weight_version: str = ""
    extra: dict[str, float] = field(default_factory=dict)


class EngineClient(Protocol):
    """An engine as its users see it; `AsyncEngine` is one, and so is a fake in a test."""

    info: EngineInfo

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> AsyncIterator[Delta]:
        """Continue a prompt. Closing the iterator (or cancelling the task that reads it) aborts the request.

        Args:
            prompt_token_ids: at least one token.
            params: how.
            request_id: unique among the requests alive.
            priority: lower goes first.
            cache_salt: requests share cached prefixes only under the same salt.
            adapter: name of a loaded adapter; None is the plain model.

        Yields:
            Deltas of all n sequences, interleaved; each sequence's last one has a finish_reason.

        Raises:
            ContractError, CapacityError: the request can never run; before anything is queued.
            OverloadedError: the queue is full.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; its pages are free before the next step. Unknown names are ignored."""
        ...

    def stats(self) -> EngineStats:
        """Numbers of this moment; safe from any thread."""
        ...

    async def control(self, command: str, arguments: Mapping[str, Any]) -> Any:
        """Run an administrative command between two steps (load weights, adapters, move pages); see docs/serving.md.

        Raises:
            ContractError: there is no such command, or its arguments do not fit.
        """
        ...
