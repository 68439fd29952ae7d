"""What may stand between a model's logits and the draw: penalties, biases, forbidden stops, a grammar."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5sdk.serve.sequence import Sequence

__all__ = ["change_logits", "needs_last_token"]


def needs_last_token(sequence: Sequence) -> bool:
    """Whether the next draw depends on the last token by more than the model: then nothing can be planned ahead."""
    p = sequence.params
    return sequence.guide is not None or bool(
        p.presence_penalty
        or p.frequency_penalty
        or p.repetition_penalty != 1.0
        or p.logit_bias
        or _stops_wait(sequence)
    )


def change_logits(logits_V: Tensor, sequence: Sequence) -> None:
    """Apply a sequence's own changes to a row of f32 logits [V], in place.

    The order is the field's: repetition penalty over prompt and continuation, frequency and presence penalties over the
    continuation, biases, stop tokens before min_tokens, grammar.
    """
    p, vocab = sequence.params, logits_V.shape[0]
    if p.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.tokens)), dtype=torch.int64, device=logits_V.device)
        row = logits_V[seen]
        logits_V[seen] = torch.where(row > 0, row / p.repetition_penalty, row * p.repetition_penalty)
    if (p.frequency_penalty or p.presence_penalty) and sequence.counts:
        ids = torch.tensor(list(sequence.counts), dtype=torch.int64, device=logits_V.device)
        times = torch.tensor(list(sequence.counts.values()), dtype=torch.float32, device=logits_V.device)
        logits_V[ids] -= p.frequency_penalty * times + p.presence_penalty
    for token, bias in p.logit_bias.items():
        logits_V[token] += bias
    if _stops_wait(sequence):
        logits_V[[t for t in sequence.stop_ids if t < vocab]] = -torch.inf
    if sequence.guide is not None:
        logits_V.masked_fill_(~sequence.guide.mask().to(logits_V.device), -torch.inf)


def _stops_wait(sequence: Sequence) -> bool:
    return bool(sequence.stop_ids) and sequence.generated < sequence.params.min_tokens
