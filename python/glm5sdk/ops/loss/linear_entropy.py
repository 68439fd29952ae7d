"""Entropy of a linear head's distribution, without its logits in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from glm5sdk.ops._logsumexp import VOCAB_BLOCK, log_sum_exp, row_chunks
from glm5sdk.ops._math import accumulate, accumulator
from glm5sdk.ops._weights import dequantize_weight, gradient_target, project
from glm5sdk.registry import Cost, TestRules, WeightLike, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    t, n, v = axes["T"], axes["N"], axes["V"]
    return Cost(2 * t * n * v + 6 * t * v, size * (t * n + n * v), 4 * t)


def between_sure_and_flat(arguments: Mapping[str, Any], outs: Sequence[Tensor]) -> None:
    """0 <= entropy <= log V."""
    limit = math.log(arguments["lm_head"].shape[0])
    assert bool(((outs[0] >= -1e-4) & (outs[0] <= limit + 1e-4)).all()), f"an entropy is outside [0, {limit}]"


def surprise(logits: Tensor) -> Tensor:
    """lse - logit [T, V]: minus the log-probability of each token, never negative but for rounding."""
    return log_sum_exp(logits)[:, None] - logits


def backward(grad_entropy: Tensor, hidden: Tensor, lm_head: WeightLike) -> tuple[Tensor, Tensor]:
    """d logits = p * (lse - logit - entropy), chunk by chunk of rows, in the accumulator."""
    acc = accumulator(hidden.dtype)
    d_hidden, d_head = torch.empty_like(hidden), gradient_target(lm_head, acc)
    head = dequantize_weight(lm_head, acc)
    for rows in row_chunks(hidden.shape[0], lm_head.shape[0]):
        s = surprise(project(hidden[rows], lm_head))
        p = (-s).exp()
        d_logits = p * (s - (p * s).sum(1, keepdim=True)) * grad_entropy[rows, None]
        d_hidden[rows] = (d_logits @ head).to(hidden.dtype)
        if isinstance(lm_head, Tensor):
            d_head.addmm_(d_logits.T, accumulate(hidden[rows]))
    return d_hidden, d_head.to(hidden.dtype)


@op(
    inputs={"hidden": "a[T, N]", "lm_head": "W[V, N]"},
    outputs={"entropy": "f32[T]"},
    rows="T",
    where=("V > 0",),
    grad=("hidden", "lm_head"),
    backward=backward,
    cost=cost,
    tests=TestRules(
        properties=(between_sure_and_flat,),
        geometries=(
            {"T": 0, "N": 7, "V": 5},
            {"T": 1, "N": 1, "V": 1},
            {"T": 3, "N": 20, "V": 1023},
            {"T": 65, "N": 63, "V": 1025},
            {"T": 2, "N": 6144, "V": 130},
            {"T": 2, "N": 8, "V": 154880},
        ),
        floor={"f32": 1e-5},
    ),
)
def linear_entropy(hidden: Tensor, lm_head: WeightLike) -> Tensor:
    """Entropy of softmax(hidden lm_head^T) = sum of p * (lse - logit), logits and all sums in float32.

    Terms are not negative, so nothing cancels as it would in lse - sum of p * logit. They are summed within blocks of
    1024 columns, then over blocks ascending; lse is the one of `linear_cross_entropy`.

    Args:
        hidden: [T, N] activations.
        lm_head: [V, N], dtype of hidden, or a Weight.

    Returns:
        entropy f32 [T] in nats. Rows are independent; T = 0 is legal. [T, V] never exists whole.

    Raises:
        ContractError: shapes, dtypes or devices do not fit.
    """
    entropy = torch.empty(hidden.shape[0], dtype=accumulator(hidden.dtype), device=hidden.device)
    for rows in row_chunks(hidden.shape[0], lm_head.shape[0]):
        s = surprise(project(hidden[rows], lm_head))
        total = torch.zeros_like(s[:, 0])
        for block in s.split(VOCAB_BLOCK, 1):
            # A token that cannot be drawn surprises without end, but never does.
            total = total + torch.where(block == torch.inf, 0.0, (-block).exp() * block).sum(1)
        entropy[rows] = total
    return entropy
