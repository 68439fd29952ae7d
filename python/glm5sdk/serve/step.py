"""Step: what one engine step computes, made ready on the host while the step before it may still run."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from glm5sdk.nn.token_batch import TokenBatch
from glm5sdk.serve.outputs import TokenLogprob
from glm5sdk.serve.sequence import Sequence

__all__ = ["Drawn", "Group", "SampleSettings", "Step", "Work", "make_group", "paged_batch"]

UNKNOWN = 0  # stands in for a token drawn ahead until the step runs


@dataclass
class Work:
    """One sequence's part of a step.

    Attributes:
        sequence: whose.
        start: first row of the cache that is written.
        ids: tokens of the rows, drafts last; a token drawn ahead is UNKNOWN.
        draws: for how many last rows the next token is drawn: none inside a prompt, else one more than the drafts.
        drafts: the last ids, which the draws must confirm.
        ahead: the last id before the drafts is the token that the step before this one draws.
        epoch: of the sequence when this was made; a preemption in between makes the rows void, not the draws.
        prompt_logprobs: whether the log-probabilities of the prompt's tokens are wanted, for rows of the prompt.
    """

    sequence: Sequence
    start: int
    ids: list[int]
    draws: int
    drafts: list[int]
    ahead: bool
    epoch: int
    prompt_logprobs: bool = False

    @property
    def count(self) -> int:
        """Rows."""
        return len(self.ids)


@dataclass(frozen=True)
class SampleSettings:
    """Arguments of `ops.sample` but the logits, one row a draw."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor

    @classmethod
    def of(cls, sequences: Many[Sequence], positions: Many[int], device: torch.device) -> SampleSettings:
        """Settings of the sequences (one may repeat) for draws at these positions."""
        p = [s.params for s in sequences]

        def column(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            column([x.temperature for x in p], torch.float32),
            column([x.top_k for x in p], torch.int32),
            column([x.top_p for x in p], torch.float32),
            column([x.min_p for x in p], torch.float32),
            column([s.seed for s in sequences], torch.int64),
            column(list(positions), torch.int64),
        )

    def arguments(self) -> tuple[Tensor, ...]:
        """In the order of `ops.sample`."""
        return self.temperature, self.top_k, self.top_p, self.min_p, self.seed, self.position


@dataclass
class Group:
    """The part of a step that runs under one view of the weights: one forward pass.

    Attributes:
        view: the weights.
        works: whose rows, in order.
        ids: i64 [T].
        batch: the rows.
        draw_rows: i64 [R], rows that draw.
        drawers: sequence of each draw.
        settings: of the draws.
        table: i32 [B, M], pages of the works.
    """

    view: Any
    works: list[Work]
    ids: Tensor
    batch: TokenBatch
    draw_rows: Tensor
    drawers: list[Sequence]
    settings: SampleSettings
    table: Tensor


@dataclass
class Step:
    """One step: pages to copy first, then a forward pass for each view.

    Attributes:
        groups: by view.
        copies: (source page, target page), made before anything is written; the step holds a reference on each source.
        planned_at: the engine's clock then.
    """

    groups: list[Group]
    copies: list[tuple[int, int]] = field(default_factory=list)
    planned_at: float = 0.0

    @property
    def works(self) -> list[Work]:
        """All of them, group by group."""
        return [work for group in self.groups for work in group.works]


@dataclass
class Drawn:
    """What a step gave for one work.

    Attributes:
        tokens: drawn and, behind accepted drafts, confirmed tokens; at least one where something was drawn.
        logprobs: of the tokens, when asked for.
        prompt_logprobs: of the prompt's tokens after the rows computed, when asked for.
        drafts: proposals for the places after the tokens.
        proposed: drafts that were checked.
        error: why the sequence cannot go on, alone of all in the step.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    proposed: int = 0
    error: str | None = None


def make_group(view: Any, works: list[Work], page_size: int, device: torch.device) -> Group:
    """Tensors of one forward pass."""
    table = _table([w.sequence.pages for w in works], device)
    batch = TokenBatch.paged([w.start for w in works], [w.count for w in works], table, page_size)
    rows: list[int] = []
    positions: list[int] = []
    drawers: list[Sequence] = []
    end = 0
    for work in works:
        end += work.count
        rows += range(end - work.draws, end)
        last = work.start + work.count
        positions += range(last - work.draws + 1, last + 1)
        drawers += [work.sequence] * work.draws
    ids = torch.tensor([i for w in works for i in w.ids], dtype=torch.int64, device=device)
    settings = SampleSettings.of(drawers, positions, device)
    return Group(
        view, works, ids, batch, torch.tensor(rows, dtype=torch.int64, device=device), drawers, settings, table
    )


def paged_batch(table: Tensor, rows: Many[int], past: Many[int], page_size: int) -> TokenBatch:
    """One new token for each of these rows of a block table."""
    chosen = table[list(rows)]
    return TokenBatch.paged(list(past), [1] * len(rows), chosen, page_size)


def _table(pages: list[list[int]], device: torch.device) -> Tensor:
    widest = max((len(p) for p in pages), default=1)
    rows = [p + [0] * (widest - len(p)) for p in pages]
    return torch.tensor(rows, dtype=torch.int32, device=device).view(len(pages), widest)
