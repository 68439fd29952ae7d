"""Attention, selection and paging in plain Python: lists of float64 and loops, nothing shared with the references."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Row = Sequence[float]


def dot(a: Row, b: Row) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def key_at(cache: Tensor, table: Tensor, request: int, position: int) -> list[float]:
    """The row of a plain cache [P, S, L] at a logical position."""
    size = cache.shape[1]
    return cache[int(table[request, position // size]), position % size].double().tolist()


def attention(query: Row, keys: Sequence[Row], scale: float, values: int) -> tuple[list[float], float]:
    """One head's output and log-sum-exp; 0 and -inf without keys."""
    if not keys:
        return [0.0] * values, -math.inf
    scores = [scale * dot(query, k) for k in keys]
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    total = math.fsum(weights)
    out = [math.fsum(w * k[c] for w, k in zip(weights, keys, strict=True)) / total for c in range(values)]
    return out, top + math.log(total)


def index_score(queries: Sequence[Row], weights: Row, key: Row) -> float:
    return math.fsum(w * max(0.0, dot(q, key)) for q, w in zip(queries, weights, strict=True))


def best(scores: Row, topk: int) -> list[int]:
    """Positions of the best scores, ascending; higher first, then lower position, NaN as -inf."""
    clean = [-math.inf if math.isnan(s) else s for s in scores]
    return sorted(sorted(range(len(clean)), key=lambda i: (-clean[i], i))[:topk])


def padded(positions: list[int], topk: int) -> list[int]:
    return positions + [-1] * (topk - len(positions))


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def i32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rope_table(length: int, rope: int, theta: float = 10000.0) -> Tensor:
    """cos_sin [length, rope] in float64."""
    angles = [[p * theta ** (-2.0 * j / rope) for j in range(rope // 2)] for p in range(length)]
    rows = [[math.cos(a) for a in row] + [math.sin(a) for a in row] for row in angles]
    return torch.tensor(rows, dtype=torch.float64).view(length, rope)
