"""The stable order by expert that all expert ops share."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn.functional import pad

from glm5sdk.core.errors import ContractError
from glm5sdk.ops._math import accumulate, accumulator

__all__ = ["absent_ids", "sorted_slots", "to_bounds", "weighted_sum"]


def sorted_slots(op: str, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Flat slots `t * A + j` in ascending (expert, slot), absent ones (-1) last, and where each expert begins.

    Args:
        op: who asks, for the error.
        ids: i32 [T, A], -1 = absent.
        num_experts: E.

    Returns:
        order i64 [T*A] and offsets i64 [E+1].

    Raises:
        ContractError: an id is neither -1 nor an expert, or a token names an expert twice.
    """
    flat = ids.reshape(-1).to(torch.int64)
    wrong = (flat < -1) | (flat >= num_experts)
    if bool(wrong.any()):
        raise ContractError(f"{op}: an expert id is {int(flat[wrong][0])}, needs -1 or 0 <= id < {num_experts}")
    ordered = ids.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(twice.any()):
        t, j = twice.nonzero()[0].tolist()
        raise ContractError(f"{op}: token {t} names expert {int(ordered[t, j])} twice, needs distinct experts")
    key = torch.where(flat < 0, num_experts, flat)
    counts = torch.bincount(key, minlength=num_experts + 1)[:num_experts]
    return key.argsort(stable=True), pad(counts.cumsum(0), (1, 0))


def to_bounds(op: str, offsets: Tensor, rows: int) -> list[int]:
    """Offsets as integers, checked.

    Raises:
        ContractError: they do not ascend from 0 to at most `rows`.
    """
    bounds: list[int] = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] > rows or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ContractError(f"{op}: offsets are {bounds}, needs them to ascend from 0 to at most {rows} rows")
    return bounds


def weighted_sum(rows: Tensor, place: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Each token's sum of weight * row, in ascending `key`, in the accumulator, rounded once.

    Args:
        rows: [R, N].
        place: i64 [T, A] row of each slot, -1 = none: skipped, its weight is not read.
        key: [T, A] what orders the slots of a token.
        weights: f32 [T, A].

    Returns:
        [T, N], dtype of rows.
    """
    order = key.argsort(dim=1, stable=True)
    place, weights = place.gather(1, order), weights.gather(1, order)
    total = torch.zeros(place.shape[0], rows.shape[1], dtype=accumulator(rows.dtype), device=rows.device)
    for j in range(place.shape[1] if len(rows) else 0):
        term = weights[:, j : j + 1].to(total.dtype) * accumulate(rows[place[:, j].clamp(min=0)])
        total = torch.where(place[:, j : j + 1] >= 0, total + term, total)
    return total.to(rows.dtype)


def absent_ids(tokens: int, slots: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Test input: i32 [T, A] distinct ascending ids, a tenth of them -1; the last expert gets none where it can."""
    pool = max(num_experts - 1, slots)
    ids = torch.rand(tokens, pool, generator=generator).argsort(1)[:, :slots].sort(1).values
    absent = torch.rand(tokens, slots, generator=generator) < 0.1
    return torch.where(absent | (ids >= num_experts), -1, ids).to(torch.int32)
