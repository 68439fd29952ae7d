"""Log-probabilities beside the tokens: the same bits as the model's own `logprobs`."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glm5sdk import ops
from glm5sdk.serve.outputs import TokenLogprob

if TYPE_CHECKING:
    from glm5sdk.models.glm5.model import Glm5ForCausalLM

__all__ = ["token_logprobs"]

# Rows whose logits [rows, V] exist at once.
CHUNK = 64


def token_logprobs(
    model: Glm5ForCausalLM, hidden_TN: Tensor, targets: Many[int], tops: Many[int], logits_TV: Tensor | None = None
) -> list[TokenLogprob]:
    """Log-probability of a target after each hidden state, at temperature 1 and unfiltered.

    Args:
        model: whose head is asked.
        hidden_TN: [T, N] after the final norm.
        targets: T token ids.
        tops: for each row, how many best tokens are reported too.
        logits_TV: f32 [T, V] of these rows where they exist already.

    Returns:
        One entry a row.
    """
    out: list[TokenLogprob] = []
    for begin in range(0, len(targets), CHUNK):
        rows = slice(begin, begin + CHUNK)
        wanted = torch.tensor(list(targets[rows]), dtype=torch.int64, device=hidden_TN.device)
        loss, lse = ops.linear_cross_entropy(hidden_TN[rows], model.lm_head.weight, wanted)
        best: list[tuple[tuple[int, float], ...]] = [()] * len(wanted)
        if any(tops[rows]):
            logits = model.logits(hidden_TN[rows]) if logits_TV is None else logits_TV[rows]
            best = [_best(row, k, total) for row, k, total in zip(logits, tops[rows], lse, strict=True)]
        values = loss.neg().tolist()
        out += [TokenLogprob(t, v, b) for t, v, b in zip(targets[rows], values, best, strict=True)]
    return out


def _best(logits_V: Tensor, k: int, lse: Tensor) -> tuple[tuple[int, float], ...]:
    """The k best tokens, ties to the lower id, which torch.topk does not promise."""
    if not k:
        return ()
    edge = logits_V.topk(min(k, logits_V.shape[0])).values[-1]
    ids = (logits_V >= edge).nonzero()[:, 0]  # ascending; more than k where logits tie
    values = logits_V[ids]
    order = values.sort(descending=True, stable=True).indices[:k]
    return tuple(zip(ids[order].tolist(), (values[order] - lse).tolist(), strict=True))
