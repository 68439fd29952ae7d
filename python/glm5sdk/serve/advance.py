"""Advance: what a step computed is taken into its sequences, up to the token that ends one."""

from __future__ import annotations

from glm5sdk.serve.sequence import Sequence
from glm5sdk.serve.step import Drawn, Work

__all__ = ["advance"]


def advance(work: Work, drawn: Drawn) -> None:
    """Bring a sequence up to date with its part of a finished step; afterwards it may be finished."""
    sequence = work.sequence
    sequence.ahead -= bool(work.draws)
    if sequence.finished:
        return
    rejected = work.draws - len(drawn.tokens)
    if work.epoch == sequence.epoch:  # else it was preempted: the rows are gone, the draws are right all the same
        sequence.planned -= rejected
        sequence.computed = work.start + work.count - rejected
        sequence.drafts = drawn.drafts
    if work.prompt_logprobs:
        if work.start == 0:
            sequence.prompt_logprobs = [None]
        sequence.prompt_logprobs += drawn.prompt_logprobs
    if drawn.error is not None:
        sequence.finish("error", error=drawn.error)
        return
    for place, token in enumerate(drawn.tokens):
        if drawn.logprobs:
            sequence.logprobs.append(drawn.logprobs[place])
        _append(sequence, token)
        if sequence.finished:
            return


def _append(sequence: Sequence, token: int) -> None:
    sequence.tokens.append(token)
    sequence.counts[token] = sequence.counts.get(token, 0) + 1
    if sequence.guide is not None:
        sequence.guide.accept(token)
    if token in sequence.stop_ids and sequence.generated > sequence.params.min_tokens:
        sequence.finish("stop", token if token in sequence.params.stop_token_ids else None)
    elif sequence.guide is not None and sequence.guide.is_finished:
        sequence.finish("stop")
    elif len(sequence.tokens) >= sequence.limit:
        sequence.finish("length")
