"""Sequence: one continuation of one prompt on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from glm5sdk.nn.weight_view import WeightView
from glm5sdk.serve.detokenize import TextStream
from glm5sdk.serve.guidance import Guide
from glm5sdk.serve.outputs import Delta, TokenLogprob
from glm5sdk.serve.params import SamplingParams

__all__ = ["Sequence"]


@dataclass(eq=False)
class Sequence:
    """State of one sequence. The engine's thread alone touches it.

    A row of the cache is *planned* when a step that writes it has been made, and *computed* when that step is done;
    with a step in flight the two differ. A token is *drawn ahead* when the step that draws it is in flight: its place
    is known and its id is not.

    Attributes:
        request_id, index, priority, arrival: as the caller gave them.
        tokens: prompt and what has been drawn.
        prompt_len: how many of them are the prompt.
        params: how to go on; seed: of the draws.
        stop_ids: tokens that end it.
        limit: length at which it ends.
        namespace: under which its prefix is cached.
        view: weights it was admitted with.
        current: those are still the ones that new requests get, so that its prefix is of use to them.
        started: when its first step was planned.
        leader: the first of the request's n sequences, for the others, which share what it has read.
        guide: matcher of structured output, or None.
        text: of the continuation.
        pages: of the cache, in order.
        planned, computed: rows of the cache.
        ahead: tokens drawn ahead (0 or 1).
        drafts: tokens proposed for the places after the last one.
        cached: prompt tokens that came from the prefix cache when it was first admitted.
        inserted: rows already given to the prefix cache.
        epoch: how often it was preempted.
        finish_reason, stop_reason, error: once it has ended.
        emitted: tokens that have been handed out, the prompt's included.
        logprobs, prompt_logprobs: not handed out yet.
        counts: how often each token was drawn.
    """

    request_id: str
    index: int
    tokens: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    limit: int
    namespace: str
    text: TextStream
    view: WeightView
    priority: int = 0
    arrival: float = 0.0
    guide: Guide | None = None
    leader: Sequence | None = None
    current: bool = True
    started: float | None = None
    prompt_len: int = field(init=False)
    pages: list[int] = field(default_factory=list)
    planned: int = 0
    computed: int = 0
    ahead: int = 0
    drafts: list[int] = field(default_factory=list)
    cached: int | None = None
    inserted: int = 0
    epoch: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    emitted: int = field(init=False)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)
        self.emitted = self.prompt_len

    @property
    def waits_for_leader(self) -> bool:
        """Whether the first sequence of its request is still reading the prompt that both have."""
        leader = self.leader
        return leader is not None and not leader.finished and leader.computed < leader.prompt_len

    @property
    def prompt_tokens(self) -> int:
        """Length of what must be read before anything is drawn; the queue counts it."""
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens whose place is known, drawn ahead or not."""
        return len(self.tokens) + self.ahead

    @property
    def generated(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def finish(self, reason: str, stop_reason: int | str | None = None, error: str | None = None) -> None:
        """End it; the first reason stands."""
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error

    def restart(self) -> None:
        """Forget what was computed, keep what was drawn: a preempted sequence reads its own words again."""
        self.planned = self.computed = self.inserted = 0
        self.drafts = []
        self.epoch += 1

    def delta(self, **more: Any) -> Delta:
        """An empty delta of this sequence."""
        return Delta(
            self.request_id, self.index, prompt_tokens=self.prompt_len, cached_tokens=self.cached or 0,
            weight_version=self.view.version, seed=self.seed, **more,
        )  # fmt: skip
