"""Cross entropy of a linear head, without its logits in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from glm5sdk.ops._logsumexp import ignored_or_checked, log_sum_exp, row_chunks
from glm5sdk.ops._math import accumulate, accumulator
from glm5sdk.ops._weights import dequantize_weight, gradient_target, project
from glm5sdk.registry import Cost, TestRules, WeightLike, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    t, n, v = axes["T"], axes["N"], axes["V"]
    return Cost(2 * t * n * v + 4 * t * v, size * (t * n + n * v) + 8 * t, 8 * t)


def make_inputs(axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool) -> dict[str, Any]:
    """Targets of which a fifth is ignored."""
    targets = torch.randint(0, axes["V"], (axes["T"],), generator=generator)
    return {"targets": torch.where(torch.rand(axes["T"], generator=generator) < 0.2, -100, targets)}


def ignored_or_positive(arguments: Mapping[str, Any], outs: Sequence[Tensor]) -> None:
    """No loss is negative but for rounding, and an ignored row's is 0."""
    loss, lse = outs
    assert bool((loss >= -1e-5 * lse.abs().clamp(min=1)).all()), "a loss is negative"
    assert not loss[arguments["targets"] == -100].any(), "an ignored row has a loss"


def backward(
    grad_loss: Tensor, grad_lse: Tensor, hidden: Tensor, lm_head: WeightLike, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """d logits = softmax * (gl + ge) - onehot * gl, made and used chunk by chunk of rows, in the accumulator."""
    acc = accumulator(hidden.dtype)
    counts, safe = ignored_or_checked("linear_cross_entropy", targets, lm_head.shape[0])
    from_loss = torch.where(counts, grad_loss, 0)
    d_hidden, d_head = torch.empty_like(hidden), gradient_target(lm_head, acc)
    head = dequantize_weight(lm_head, acc)
    for rows in row_chunks(hidden.shape[0], lm_head.shape[0]):
        logits = project(hidden[rows], lm_head)
        d_logits = logits.sub_(log_sum_exp(logits)[:, None]).exp_()
        d_logits *= (from_loss[rows] + grad_lse[rows])[:, None]
        d_logits.scatter_add_(1, safe[rows, None], -from_loss[rows, None])
        d_hidden[rows] = d_logits @ head
        if isinstance(lm_head, Tensor):
            d_head.addmm_(d_logits.T, accumulate(hidden[rows]))
    return d_hidden, d_head.to(hidden.dtype)


@op(
    inputs={"hidden": "a[T, N]", "lm_head": "W[V, N]", "targets": "i64[T]"},
    outputs={"loss": "f32[T]", "lse": "f32[T]"},
    rows="T",
    where=("V > 0",),
    grad=("hidden", "lm_head"),
    backward=backward,
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        properties=(ignored_or_positive,),
        geometries=(
            {"T": 0, "N": 7, "V": 5},
            {"T": 1, "N": 1, "V": 1},
            {"T": 3, "N": 20, "V": 1023},
            {"T": 3, "N": 12, "V": 1024},
            {"T": 3, "N": 40, "V": 1025},
            {"T": 65, "N": 63, "V": 2049},
            {"T": 2, "N": 6144, "V": 130},
            {"T": 2, "N": 8, "V": 154880},
        ),
    ),
)
def linear_cross_entropy(hidden: Tensor, lm_head: WeightLike, targets: Tensor) -> tuple[Tensor, Tensor]:
    """loss = lse - logit of the target, lse = log sum exp of the logits hidden lm_head^T, which stay in float32.

    The log-sum-exp runs in fixed blocks of 1024 columns (see ops/_logsumexp.py), the same that `sample` uses: -loss is
    bit for bit the log-probability that sampling reports. Rows are read in chunks; [T, V] never exists whole.

    Args:
        hidden: [T, N] activations.
        lm_head: [V, N], dtype of hidden, or a Weight.
        targets: i64 [T]; -100 = ignored: its loss is 0, its lse is still made.

    Returns:
        loss f32 [T] and lse f32 [T], in nats, one per row and not averaged. T = 0 is legal. Gradients go to hidden and
        a plain lm_head, from both outputs.

    Raises:
        ContractError: a target is neither -100 nor in [0, V); shapes, dtypes or devices do not fit.
    """
    counts, safe = ignored_or_checked("linear_cross_entropy", targets, lm_head.shape[0])
    acc = accumulator(hidden.dtype)
    loss, lse = (torch.empty(hidden.shape[0], dtype=acc, device=hidden.device) for _ in range(2))
    for rows in row_chunks(hidden.shape[0], lm_head.shape[0]):
        logits = project(hidden[rows], lm_head)
        total = log_sum_exp(logits)
        picked = logits.gather(1, safe[rows, None])[:, 0]
        lse[rows] = total
        loss[rows] = torch.where(counts[rows], total - picked, 0)
    return loss, lse
