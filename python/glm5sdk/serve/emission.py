"""Emission: tokens that a sequence gained become a delta, and a stop string may end it here."""

from __future__ import annotations

from glm5sdk.serve.outputs import Delta
from glm5sdk.serve.sequence import Sequence

__all__ = ["emit"]


def emit(sequence: Sequence) -> Delta | None:
    """What is new in a sequence, None when nothing is.

    A stop string that shows now ends the sequence, whatever was drawn behind it; its tokens behind are dropped.
    """
    new = sequence.tokens[sequence.emitted :]
    if not new or sequence.finish_reason in ("abort", "error"):
        return None
    ended_by_token = sequence.finish_reason == "stop" and new[-1] in sequence.stop_ids
    text, hit, used = sequence.text.push(new[:-1] if ended_by_token else new)
    if hit is not None:
        del sequence.tokens[sequence.emitted + used :]
        sequence.finish_reason, sequence.stop_reason = "stop", hit
        new = new[:used]
    elif sequence.finished:
        text += sequence.text.finish()
    first = sequence.emitted == sequence.prompt_len
    sequence.emitted += len(new)
    delta = sequence.delta(token_ids=new, text=text, finish_reason=sequence.finish_reason)
    delta.stop_reason = sequence.stop_reason
    if first and sequence.started is not None:
        delta.queue_seconds = sequence.started - sequence.arrival
    if sequence.params.logprobs is not None:
        delta.logprobs, sequence.logprobs = sequence.logprobs[: len(new)], []
    if sequence.prompt_logprobs:
        delta.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, []
    return delta
