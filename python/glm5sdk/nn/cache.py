"""The paged cache of a model: latent KV rows of every layer, index keys of the layers that own an indexer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from glm5sdk.core.errors import CapacityError, ContractError
from glm5sdk.nn.token_batch import TokenBatch
from glm5sdk.registry.contract_scalars import as_int
from glm5sdk.registry.formats import cache_shape, is_byte_format

__all__ = ["CachePools", "CacheSizes", "LatentCache"]


class CacheSizes(NamedTuple):
    """What a cache and the model that fills it must agree on."""

    latent: int
    rope: int
    index_dim: int
    index_layers: tuple[bool, ...]
    dtype: torch.dtype


class CachePools:
    """Pools of pages, one page id for all: a page is a page in every layer's KV pool and in every index pool alike.

    Attributes:
        kv: by layer, KV rows in the shape of the format.
        index: by layer, index keys, None where a layer keeps none.
        kv_format, index_format, page_size, num_pages: as given.
        made_for: what a model must agree on.

    Args:
        num_pages: pages.
        page_size: tokens a page.
        sizes: of the rows.
        device: where the pools live.
        kv_format, index_format: see docs/ops.md, Caches.

    Raises:
        CapacityError: the pools do not fit into memory, or their rows into 31 bits.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        sizes: CacheSizes,
        device: torch.device | str,
        kv_format: str = "plain",
        index_format: str = "plain",
    ) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if as_int("cache", name, value) < 1:
                raise ContractError(f"cache: {name} is {value}, needs at least 1")
        self.num_pages, self.page_size = num_pages, page_size
        self.kv_format, self.index_format = kv_format, index_format
        self.made_for = sizes
        if num_pages * page_size >= 2**31:
            raise CapacityError(
                f"cache: {num_pages} pages of {page_size} tokens are {num_pages * page_size} rows, "
                "needs fewer than 2147483648"
            )
        kv_shape = cache_shape("kv_cache", kv_format, num_pages, page_size, sizes.latent, sizes.rope)
        index_shape = cache_shape("index_cache", index_format, num_pages, page_size, sizes.index_dim)
        kv_dtype = torch.uint8 if is_byte_format(kv_format) else sizes.dtype
        index_dtype = torch.uint8 if is_byte_format(index_format) else sizes.dtype
        try:
            self.kv = [torch.zeros(kv_shape, dtype=kv_dtype, device=device) for _ in sizes.index_layers]
            self.index: list[Tensor | None] = [
                torch.zeros(index_shape, dtype=index_dtype, device=device) if owns else None
                for owns in sizes.index_layers
            ]
        except RuntimeError as error:  # torch's word for no memory, the accelerators' OutOfMemoryError included
            raise CapacityError(
                f"cache: {num_pages} pages of {page_size} tokens do not fit into memory, "
                f"needs fewer: {str(error).splitlines()[0]}"
            ) from error

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all pools together."""
        return sum(pool[0].nbytes for pool in self.pools())

    def pools(self) -> list[Tensor]:
        """Every pool [num_pages, ...]: KV of all layers, then index keys of the layers that keep some."""
        return [*self.kv, *(pool for pool in self.index if pool is not None)]

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole pages inside every pool; no target may also be a source."""
        if not source:
            return
        for pool in self.pools():
            pool[list(target)] = pool[list(source)]


class LatentCache(CachePools):
    """Pools of pages for a fixed set of requests; a KV row and its index row live and die together.

    Args:
        batch_size: requests, B.
        max_seq_len: tokens a request may reach.
        page_size: tokens a page.
        latent, rope: parts of a KV row (C, R).
        index_dim: width of an index key (Di).
        index_layers: for each layer, whether it keeps index keys.
        dtype, device: of plain rows.
        kv_format, index_format: see docs/ops.md, Caches.
    """

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        page_size: int,
        latent: int,
        rope: int,
        index_dim: int,
        index_layers: Sequence[bool],
        dtype: torch.dtype,
        device: torch.device | str,
        kv_format: str = "plain",
        index_format: str = "plain",
    ) -> None:
        for name, value in (("batch_size", batch_size), ("max_seq_len", max_seq_len), ("page_size", page_size)):
            if as_int("cache", name, value) < 1:
                raise ContractError(f"cache: {name} is {value}, needs at least 1")
        pages_each = -(-max_seq_len // page_size)
        sizes = CacheSizes(latent, rope, index_dim, tuple(index_layers), dtype)
        super().__init__(batch_size * pages_each, page_size, sizes, device, kv_format, index_format)
        self.batch_size, self.max_seq_len = batch_size, max_seq_len
        table = torch.arange(self.num_pages, dtype=torch.int32).view(batch_size, pages_each)
        self.block_table = table.to(device)
        self.lengths = [0] * batch_size

    @property
    def device(self) -> torch.device:
        return self.block_table.device

    def batch(self, lengths: Sequence[int]) -> TokenBatch:
        """The step that appends `lengths[b]` tokens to each request; does not advance the cache.

        Raises:
            CapacityError: a request would outgrow max_seq_len; nothing was changed.
        """
        for request, (old, new) in enumerate(zip(self.lengths, lengths, strict=True)):
            if old + new > self.max_seq_len:
                raise CapacityError(
                    f"cache: request {request} is {old} tokens long and gets {new} more, "
                    f"needs at most max_seq_len {self.max_seq_len}; make a larger cache"
                )
        return TokenBatch.paged(self.lengths, lengths, self.block_table, self.page_size)

    def advance(self, lengths: Sequence[int]) -> None:
        """Count the tokens of a finished step."""
        self.lengths = [old + new for old, new in zip(self.lengths, lengths, strict=True)]

    def crop(self, length: int) -> None:
        """Forget every request's tokens past `length`; their rows are overwritten by the next ones."""
        if length < 0:
            raise ContractError(f"cache: crop length is {length}, needs at least 0")
        self.lengths = [min(old, length) for old in self.lengths]

    def select(self, requests: Sequence[int]) -> None:
        """Keep these requests in this order (a request may repeat: its rows are copied), in every pool alike."""
        if bad := [r for r in requests if not 0 <= r < self.batch_size]:
            raise ContractError(f"cache: request is {bad[0]}, needs 0 to {self.batch_size - 1}")
        pages = self.block_table[list(requests)].reshape(-1).long()
        self.kv = [pool[pages] for pool in self.kv]
        self.index = [None if pool is None else pool[pages] for pool in self.index]
        self.lengths = [self.lengths[r] for r in requests]
        self.batch_size, self.num_pages = len(requests), len(pages)
        table = torch.arange(len(pages), dtype=torch.int32, device=self.device)
        self.block_table = table.view(self.batch_size, -1)

    def to(self, device: torch.device | str) -> LatentCache:
        """Move every pool, index keys included; in place."""
        self.block_table = self.block_table.to(device)
        self.kv = [pool.to(device) for pool in self.kv]
        self.index = [None if pool is None else pool.to(device) for pool in self.index]
        return self
