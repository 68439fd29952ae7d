"""Distance of a quantised model's distributions from the float model's, on text that chose nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5.model import Glm5ForCausalLM
from glm5sdk.nn.token_batch import TokenBatch

__all__ = ["Divergence", "compare_logits", "held_out_states", "packed_states", "relative_error"]

_ROWS = 256  # tokens whose logits exist at a time


@dataclass(frozen=True)
class Divergence:
    """Next-token distributions, float against quantised.

    Attributes:
        tokens: positions compared.
        kl_mean, kl_max: KL(float || quantised) per position, nats.
        perplexity_before, perplexity_after: exp of the mean loss; NaN when there is no position with a next token.
        agreement: share of positions whose most likely token is the same.
    """

    tokens: int
    kl_mean: float
    kl_max: float
    perplexity_before: float
    perplexity_after: float
    agreement: float


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in float64; 0 where both are nothing."""
    want64 = want.double()
    lost, size = float((got.double() - want64).norm()), float(want64.norm())
    return lost / size if size else math.inf if lost else 0.0


def packed_states(model: Glm5ForCausalLM, ids: Tensor) -> Tensor:
    """Hidden states [B, S, N] after the final norm of sequences [B, S], one sequence at a time."""
    with torch.no_grad():
        rows = [
            model.hidden_states(row, model.context(TokenBatch.packed([len(row)], model.device)))
            for row in ids.to(model.device)
        ]
    return torch.stack(rows)


def held_out_states(model: Glm5ForCausalLM, ids: Tensor) -> Tensor:
    """What `compare_logits` needs of the float model: small, where logits would not be.

    Args:
        model: before it is quantised.
        ids: i64 [B, S].

    Raises:
        ContractError: no token.
    """
    if ids.numel() == 0:
        raise ContractError("quantize: held-out text is 0 tokens long, needs at least 1; give more text")
    return packed_states(model, ids)


def compare_logits(model: Glm5ForCausalLM, ids: Tensor, before: Tensor) -> Divergence:
    """Compare the quantised model with the float one's hidden states; the head is float in both.

    Args:
        model: quantised.
        ids: i64 [B, S], the same as before.
        before: of `held_out_states`.
    """
    after = packed_states(model, ids).flatten(0, 1)
    before = before.flatten(0, 1)
    targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -1)], 1).flatten().to(model.device)
    kls, losses, agree = [], [], 0
    for start in range(0, len(after), _ROWS):
        rows = slice(start, start + _ROWS)
        with torch.no_grad():
            p, q = (model.logits(h[rows]).double().log_softmax(-1) for h in (before, after))
        kls.append((p.exp() * (p - q)).sum(-1))
        agree += int((p.argmax(-1) == q.argmax(-1)).sum())
        known = targets[rows] >= 0
        chosen = targets[rows][known, None]
        losses.append(torch.cat([p[known].gather(1, chosen), q[known].gather(1, chosen)], 1).neg())
    kl, loss = torch.cat(kls), torch.cat(losses)
    ppl = [float(loss[:, i].mean().exp()) if len(loss) else math.nan for i in (0, 1)]
    return Divergence(len(kl), float(kl.mean()), float(kl.max()), *ppl, agree / len(kl))
