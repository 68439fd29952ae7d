"""The one log-sum-exp behind the loss, prompt log-probabilities, entropies and sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5sdk.core.errors import ContractError

__all__ = ["VOCAB_BLOCK", "ignored_or_checked", "log_sum_exp", "row_chunks"]

VOCAB_BLOCK = 1024
IGNORED = -100
_CHUNK_ELEMENTS = 2**26


def log_sum_exp(logits: Tensor) -> Tensor:
    """Natural log of the sum of exp over each row.

    Blocks of 1024 columns, each with its own maximum m and sum of exp(x - m); blocks merge in ascending order:
    M = max(m, m'), s = s * exp(m - M) + s' * exp(m' - M). The result is m + log(s).

    Args:
        logits: f32 or f64 [T, V].

    Returns:
        [T], same dtype; -inf for a row without a finite logit.
    """
    whole = logits.shape[1] // VOCAB_BLOCK * VOCAB_BLOCK
    parts = [logits[:, :whole].unflatten(1, (whole // VOCAB_BLOCK, VOCAB_BLOCK))] if whole else []
    if whole < logits.shape[1]:
        parts.append(logits[:, None, whole:])
    largest = torch.full_like(logits[:, 0], -torch.inf) if parts else logits.new_full(logits.shape[:1], -torch.inf)
    total = torch.zeros_like(largest)
    for part in parts:
        maxima = part.detach().amax(2)  # a constant shift: its gradient cancels
        sums = (part - _finite(maxima)[:, :, None]).exp().sum(2)
        for m, s in zip(maxima.unbind(1), sums.unbind(1), strict=True):
            merged = torch.maximum(largest, m)
            shift = _finite(merged)
            total = total * (largest - shift).exp() + s * (m - shift).exp()
            largest = merged
    return largest + total.log()


def _finite(maxima: Tensor) -> Tensor:
    """0 in place of -inf: exp(-inf - 0) is the 0 that exp(-inf + inf) is not."""
    return torch.where(maxima == -torch.inf, 0, maxima)


def row_chunks(rows: int, columns: int) -> list[slice]:
    """Slices of at most 1024 rows and about 2^26 elements, so that [T, V] never exists whole."""
    size = max(1, min(1024, _CHUNK_ELEMENTS // max(1, columns)))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def ignored_or_checked(op: str, targets: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """(which rows count, targets with 0 where ignored).

    Raises:
        ContractError: a target is neither -100 nor a token.
    """
    counts = targets != IGNORED
    wrong = counts & ((targets < 0) | (targets >= vocabulary))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ContractError(
            f"{op}: targets[{row}] is {int(targets[row])}, needs {IGNORED} (ignored) or 0 <= target < {vocabulary}"
        )
    return counts, torch.where(counts, targets, 0)
