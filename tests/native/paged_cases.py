"""Paged caches for the kernel tests: filled through the writers, pages out of order, read back as float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm5sdk.registry.formats import kv_row_bytes
from glm5sdk_cpu import _C

__all__ = ["Paged", "index_rows", "kv_rows", "paged", "selections"]


@dataclass
class Paged:
    """Requests of `capacity` tokens each in pages of `size`.

    Attributes:
        table: block_table [B, M] i32.
        slots: [B, capacity] i64, where each logical position lies.
        cache: in its format.
        keys: [B, capacity, width] f64, the rows as the cache holds them.
    """

    table: Tensor
    slots: Tensor
    cache: Tensor
    keys: Tensor


def paged(rows: Tensor, size: int, format: str, latent: int, seed: int = 0) -> Paged:
    """Rows [B, capacity, width] cached: `plain`, `fp8_ds_mla` with that latent width, or `fp8` index keys."""
    requests, capacity, width = rows.shape
    logical = -(-capacity // size)
    pages = requests * logical + 2
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    table = order[: requests * logical].view(requests, logical)
    position = torch.arange(capacity)
    slots = table[:, position // size] * size + position % size
    flat, where = rows.flatten(0, 1).contiguous(), slots.flatten()
    if format == "plain":
        cache = torch.full((pages, size, width), torch.nan, dtype=rows.dtype)
        cache.view(-1, width)[where] = flat
        keys = flat.double()
    elif format == "fp8_ds_mla":
        cache = torch.full((pages, size, kv_row_bytes(latent, width - latent)), 0x7F, dtype=torch.uint8)
        _C.concat_and_cache_mla(0, flat, cache, where, latent, format)
        keys = kv_rows(cache, where, latent)
    else:
        cache = torch.full((pages, size * (width + 4)), 0x7F, dtype=torch.uint8)
        _C.cache_index_keys(0, flat, cache, where, format)
        keys = index_rows(cache, where, width)
    return Paged(table.int().contiguous(), slots, cache, keys.view(rows.shape))


def kv_rows(cache: Tensor, slots: Tensor, latent: int) -> Tensor:
    """Rows of an fp8_ds_mla cache in f64: the f32 product of code and scale, then the bf16 part."""
    rows = cache.view(-1, cache.shape[-1])[slots]
    groups = -(-latent // 128)
    codes = rows[:, :latent].clone().view(torch.float8_e4m3fn).float()
    scales = rows[:, latent : latent + 4 * groups].clone().view(torch.float32)
    values = codes * scales.repeat_interleave(128, dim=1)[:, :latent]
    return torch.cat([values.double(), rows[:, latent + 4 * groups :].clone().view(torch.bfloat16).double()], dim=1)


def index_rows(cache: Tensor, slots: Tensor, dim: int) -> Tensor:
    """Keys of an fp8 index cache in f64."""
    size = cache.shape[1] // (dim + 4)
    page, offset = slots // size, slots % size
    codes = cache[:, : size * dim].reshape(-1, size, dim)[page, offset].view(torch.float8_e4m3fn).float()
    scales = cache[:, size * dim :].reshape(-1, size, 4)[page, offset].view(torch.float32)
    return (codes * scales).double()


def selections(kv_lens: Tensor, groups: int, k: int, seed: int) -> Tensor:
    """indices [T, groups, k] i32: min(k, kv_len) random positions, ascending, then -1."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((len(kv_lens), groups, k), -1, dtype=torch.int32)
    for t, length in enumerate(kv_lens.tolist()):
        for g in range(groups):
            chosen = torch.randperm(length, generator=generator)[:k].sort().values
            indices[t, g, : len(chosen)] = chosen.int()
    return indices
