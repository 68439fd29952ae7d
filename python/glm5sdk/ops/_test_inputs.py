"""Inputs that the attention ops' test rules share: rope tables, page tables, ragged lengths, slots and selections.

Every maker draws from the generator it is given and from nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glm5sdk.ops._cache import write_index_rows, write_kv_rows
from glm5sdk.ops._math import accumulator
from glm5sdk.registry.formats import INDEX_FORMATS, KV_FORMATS, cache_shape, is_byte_format

__all__ = [
    "choose",
    "draw",
    "empty_rows_are_empty",
    "index_cache_inputs",
    "kv_cache_inputs",
    "page_inputs",
    "rope_inputs",
    "selections",
    "slot_inputs",
]

Axes = Mapping[str, int]
SCALE = 0.0625  # 256 ** -0.5, GLM-5's


def draw(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, exact: bool) -> Tensor:
    """Normal values, or integers in [-2, 2] when `exact`."""
    if exact:
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def choose(high: int, generator: torch.Generator) -> int:
    """An integer in [0, high)."""
    return int(torch.randint(high, (), generator=generator))


def rope_inputs(axes: Axes, dtype: torch.dtype, generator: torch.Generator, exact: bool) -> dict[str, Any]:
    """positions [T] and cos_sin [Pmax, R]: real angles, or quarter turns when `exact`."""
    length, half = axes["Pmax"], axes["R"] // 2
    positions = torch.randint(length, (axes["T"],), generator=generator) if length else torch.zeros(0, dtype=torch.long)
    if exact:
        turns = torch.randint(4, (length, half), generator=generator)
        table = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])[turns]
        cos_sin = torch.cat([table[..., 0], table[..., 1]], dim=-1)
    else:
        frequencies = 1e6 ** (-torch.arange(half, dtype=torch.float64) / max(half, 1))
        angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return {"positions": positions, "cos_sin": cos_sin.float().to(accumulator(dtype))}


def page_inputs(axes: Axes, generator: torch.Generator) -> dict[str, Any]:
    """block_table [B, M] with pages out of order, request_ids [T] with padding rows, ragged kv_lens [T].

    Pages are shared between requests only where the pool is too small to give each its own. A quarter of the rows see
    all their request's keys, so that geometries meet the page and block boundaries they name.
    """
    requests, logical, pages, size, rows = (axes[a] for a in ("B", "M", "P", "S", "T"))
    count = requests * logical
    if pages >= count:
        table = torch.randperm(pages, generator=generator)[:count]
    elif pages:
        table = torch.randint(pages, (count,), generator=generator)
    else:
        table = torch.full((count,), -1)
    capacity = logical * size if pages else 0
    kv_lens = torch.randint(capacity + 1, (rows,), generator=generator)
    full = torch.randint(4, (rows,), generator=generator) == 0
    return {
        "block_table": table.view(requests, logical).int(),
        "request_ids": torch.randint(-1, requests, (rows,), generator=generator).int(),
        "kv_lens": torch.where(full, capacity, kv_lens).int(),
    }


def slot_inputs(axes: Axes, generator: torch.Generator) -> dict[str, Any]:
    """slots [T] i64: distinct places of the pool out of order, some rows -1."""
    pool, rows = axes["P"] * axes["S"], axes["T"]
    slots = torch.full((rows,), -1)
    free = torch.randperm(pool, generator=generator)[:rows]
    slots[: len(free)] = free
    slots = slots[torch.randperm(rows, generator=generator)]
    skipped = torch.randint(5, (rows,), generator=generator) == 0
    return {"slots": torch.where(skipped, -1, slots)}


def selections(request_ids: Tensor, kv_lens: Tensor, groups: int, topk: int, generator: torch.Generator) -> Tensor:
    """indices [T, groups, topk] i32: strictly ascending positions below each row's length, then -1."""
    indices = torch.full((len(kv_lens), groups, topk), -1, dtype=torch.int32)
    for row, (request, length) in enumerate(zip(request_ids.tolist(), kv_lens.tolist(), strict=True)):
        for group in range(groups if request >= 0 else 0):
            most = min(length, topk)
            count = most if choose(2, generator) else choose(most + 1, generator)
            chosen = torch.randperm(length, generator=generator)[:count].sort().values
            indices[row, group, :count] = chosen.int()
    return indices


def kv_cache_inputs(
    axes: Axes, dtype: torch.dtype, generator: torch.Generator, exact: bool, format: str | None = None
) -> dict[str, Any]:
    """A full kv_cache and its format; without `format` one is drawn (`plain` when `exact`)."""
    format = format or KV_FORMATS[0 if exact else choose(len(KV_FORMATS), generator)]
    pages, size, latent, rope = (axes[a] for a in ("P", "S", "C", "R"))
    shape = cache_shape("kv_cache", format, pages, size, latent, rope)
    rows = draw((pages * size, latent + rope), dtype, generator, exact)
    cache = torch.zeros(shape, dtype=torch.uint8 if is_byte_format(format) else dtype)
    write_kv_rows(cache, torch.arange(pages * size), rows, latent, format)
    return {"kv_cache": cache, "format": format}


def index_cache_inputs(
    axes: Axes, dtype: torch.dtype, generator: torch.Generator, exact: bool, format: str | None = None
) -> dict[str, Any]:
    """A full index_cache and its format; without `format` one is drawn (`plain` when `exact`)."""
    format = format or INDEX_FORMATS[0 if exact else choose(len(INDEX_FORMATS), generator)]
    pages, size, dim = (axes[a] for a in ("P", "S", "Di"))
    shape = cache_shape("index_cache", format, pages, size, dim)
    rows = draw((pages * size, dim), dtype, generator, exact)
    cache = torch.zeros(shape, dtype=torch.uint8 if is_byte_format(format) else dtype)
    write_index_rows(cache, torch.arange(pages * size), rows, format)
    return {"index_cache": cache, "format": format}


def empty_rows_are_empty(arguments: Mapping[str, Any], outputs: tuple[Tensor, ...]) -> None:
    """Property of the attention ops: a padding row, or one without keys, is 0 with a log-sum-exp of -inf.

    Raises:
        AssertionError: it is something else, or a row with keys has no finite log-sum-exp.
    """
    out, lse = outputs
    if "indices" in arguments:
        empty = (arguments["indices"] < 0).all(-1).expand_as(lse)
    else:
        empty = (arguments["kv_lens"] == 0)[:, None].expand_as(lse)
    empty = empty | (arguments["request_ids"] < 0)[:, None]
    assert (out[empty] == 0).all(), "an empty row is not 0"
    assert (lse[empty] == -torch.inf).all(), "an empty row's log-sum-exp is not -inf"
    assert lse[~empty].isfinite().all(), "a row with keys has no finite log-sum-exp"
