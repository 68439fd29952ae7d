"""Routes and calls of the expert kernels, for the tests of each and of all together."""

from __future__ import annotations

import math

import torch
from kernel_cases import draw
from torch import Tensor

from glm5sdk_cpu import _C

__all__ = ["composed", "experts", "gated", "grouped", "permute", "routes", "unpermute", "weights_of"]


def routes(t: int, a: int, e: int, seed: int, absent: float = 0.1, shuffle: bool = False) -> Tensor:
    """i32 [t, a] distinct ids, ascending unless `shuffle`, some -1; the last expert stays without rows if it can."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(t, max(e - 1, a), generator=generator).argsort(1)[:, :a]
    if not shuffle:
        ids = ids.sort(1).values
    return ids.masked_fill(torch.rand(t, a, generator=generator) < absent, -1).to(torch.int32)


def weights_of(e: int, n: int, i: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """gate_up [e, 2i, n] and down [e, n, i] of a size that keeps products near 1."""
    return draw(e, 2 * i, n, dtype=dtype, seed=11, scale=n**-0.5), draw(e, n, i, dtype=dtype, seed=12, scale=i**-0.5)


def permute(level: int, x: Tensor, ids: Tensor, e: int) -> tuple[Tensor, Tensor, Tensor]:
    t, a = ids.shape
    rows = torch.full((t * a, x.shape[1]), math.nan, dtype=x.dtype)
    row_ids, offsets = torch.full((t * a,), -7, dtype=torch.int32), torch.full((e + 1,), -7, dtype=torch.int32)
    _C.moe_permute(level, x, ids, e, rows, row_ids, offsets)
    return rows, row_ids, offsets


def unpermute(level: int, rows: Tensor, row_ids: Tensor, weights: Tensor) -> Tensor:
    y = torch.full((weights.shape[0], rows.shape[1]), math.nan, dtype=rows.dtype)
    _C.moe_unpermute(level, rows, row_ids, weights, y)
    return y


def grouped(level: int, x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    y = torch.full((x.shape[0], w.shape[1]), math.nan, dtype=x.dtype)
    _C.grouped_gemm(level, x, w, offsets, y)
    return y


def gated(level: int, x: Tensor, limit: float | None = None) -> Tensor:
    y = torch.full((x.shape[0], x.shape[1] // 2), math.nan, dtype=x.dtype)
    _C.silu_and_mul(level, x, limit, y)
    return y


def experts(
    level: int, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit: float | None = None
) -> Tensor:
    y = torch.full_like(x, math.nan)
    _C.moe_experts(level, x, ids, weights, gate_up, down, limit, y)
    return y


def composed(
    level: int, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, limit: float | None = None
) -> Tensor:
    """moe_experts as the five kernels it fuses."""
    rows, row_ids, offsets = permute(level, x, ids, gate_up.shape[0])
    hidden = gated(level, grouped(level, rows, gate_up, offsets), limit)
    return unpermute(level, grouped(level, hidden, down, offsets), row_ids, weights)
