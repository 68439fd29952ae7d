"""RowLayer: a layer of transformers' DynamicCache whose rows lie where our kernels write and read them in place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicIndexedLayer

from glm5sdk.core.errors import ContractError

__all__ = ["RowLayer", "check_cache_keyword", "row_layer", "the_cache"]

STEP = 64  # rows a request's part of a buffer is a multiple of
KEYWORDS = ("cache", "past_key_values")  # what versions call a cache that they hand to a layer


class RowLayer(DynamicIndexedLayer):
    """KV rows [B, rows, C + R] and index keys [B, rows, Di] in growing buffers, without a copy of the past per token.

    `keys`, `values` and `indexer_keys` are views of the buffers, so that whatever transformers does to a cache layer
    (crop, reorder, repeat, select) works as it is; a layer whose views were replaced takes its rows into new buffers.
    Rotary pairs lie side by side here where transformers' own layers hold all first members, then all second ones.
    """

    def __init__(self, latent: int, rope: int, index_dim: int) -> None:
        super().__init__()
        self.latent, self.rope, self.index_dim = latent, rope, index_dim
        self._kv = self._index = torch.empty(0, 0, 0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Not for attention that is not accelerated.

        Raises:
            ContractError: always.
        """
        raise ContractError(
            "cache: its rows come from an accelerated model, needs one to go on; start a new cache after restore()"
        )

    def reserve(self, batch: int, new: int, like: Tensor) -> tuple[int, int]:
        """Room for `new` more rows of each request; (rows there are, rows a request has in the buffer).

        Raises:
            ContractError: the cache holds another batch, or rows of another dtype or device.
        """
        past = self.get_seq_length()
        if past:
            if self.keys.shape[0] != batch:
                raise ContractError(f"cache: batch is {self.keys.shape[0]}, needs this pass's {batch}")
            if self.keys.dtype != like.dtype or self.keys.device != like.device:
                raise ContractError(
                    f"cache: rows are {self.keys.dtype} on {self.keys.device}, needs {like.dtype} on {like.device}"
                )
        if not self._is_mine(batch, past) or past + new > self._rows():
            self._grow(batch, past, new, like)
        return past, self._rows()

    def advance(self, length: int) -> None:
        """Show so many rows of each request, the new ones having been written."""
        rows = self._kv[:, :length]
        self.dtype, self.device = rows.dtype, rows.device
        self.keys, self.values = rows[:, None, :, : self.latent], rows[:, None, :, self.latent :]
        self.is_initialized = True
        if self.index_dim:
            self.indexer_keys = self._index[:, :length]
            self.indexer_dtype, self.indexer_device = rows.dtype, rows.device
            self.is_indexer_initialized = True

    def kv_pool(self) -> Tensor:
        """Pages of one row, [B * rows, 1, C + R]."""
        return self._kv.view(-1, 1, self.latent + self.rope)

    def index_pool(self) -> Tensor:
        """Pages of one row, [B * rows, 1, Di]."""
        return self._index.view(-1, 1, self.index_dim)

    def write(self, past: int, kv_rows: Tensor, index_rows: Tensor | None, keep: Tensor | None) -> None:
        """Put the rows of a pass that kept them for itself, [T, .], after `past`; `keep` [B, S] says whose they are."""
        for buffer, rows in ((self._kv, kv_rows), (self._index, index_rows)):
            if rows is None:
                continue
            batch = len(buffer)
            if keep is None:
                rows = rows.view(batch, -1, rows.shape[-1])
                buffer[:, past : past + rows.shape[1]] = rows
            else:
                buffer[:, past : past + keep.shape[1]][keep] = rows

    def _rows(self) -> int:
        return self._kv.shape[1]

    def _is_mine(self, batch: int, past: int) -> bool:
        """Whether the views are still of these buffers."""
        if len(self._kv) != batch:
            return False
        if not past:
            return True
        mine = self.keys.data_ptr() == self._kv.data_ptr() and self.keys.stride(0) == self._kv.stride(0)
        if self.index_dim and self.indexer_keys is not None:
            mine &= self.indexer_keys.data_ptr() == self._index.data_ptr()
        return mine

    def _grow(self, batch: int, past: int, new: int, like: Tensor) -> None:
        rows = -(-max(past + new, past + past // 2) // STEP) * STEP
        kv = like.new_zeros(batch, rows, self.latent + self.rope)
        index = like.new_zeros(batch, rows, self.index_dim)
        if past:
            kv[:, :past, : self.latent] = self.keys[:, 0]
            kv[:, :past, self.latent :] = self.values[:, 0]
            if self.index_dim:
                index[:, :past] = self.indexer_keys
        self._kv, self._index = kv, index


def check_cache_keyword(forward: Callable[..., Any]) -> None:
    """That a forward of the installed version is handed its cache by a keyword we know.

    Raises:
        ContractError: it is not; what it calls a cache would be taken for something that attention need not read.
    """
    names = inspect.signature(forward).parameters
    if not any(name in names for name in KEYWORDS):
        raise ContractError(
            f"accelerate: {forward.__qualname__} takes {', '.join(names)}, needs {' or '.join(KEYWORDS)} among them; "
            "this version of transformers is not known here, install an older one"
        )


def the_cache(cache: Cache | None, others: Mapping[str, Any]) -> Cache | None:
    """The one cache of a call.

    Args:
        cache: what came under the newest keyword.
        others: the call's arguments that have no meaning for attention, the older keyword among them.

    Raises:
        ContractError: there are two, or one came by a keyword we do not know: reading none would be silently wrong.
    """
    found = {"cache": cache} | {
        name: value for name, value in others.items() if name in KEYWORDS or isinstance(value, Cache)
    }
    found = {name: value for name, value in found.items() if value is not None}
    if len(found) > 1 or not found.keys() <= set(KEYWORDS):
        raise ContractError(
            f"accelerated attention: a cache is passed as {', '.join(found)}, needs one, as {' or '.join(KEYWORDS)}"
        )
    return next(iter(found.values()), None)


def row_layer(cache: Cache, layer: int, latent: int, rope: int, index_dim: int) -> RowLayer:
    """The cache's layer in our form, taking over what transformers has put there.

    Args:
        cache: a DynamicCache made for the model's config.
        layer: number of the layer.
        latent: first part of a KV row.
        rope: its other part.
        index_dim: width of an index key, 0 for layers that reuse a selection.

    Raises:
        ContractError: the cache is of another kind.
    """
    found = cache.layers[layer] if layer < len(cache.layers) else None
    if type(found) is RowLayer:
        return found
    if type(found) is not DynamicIndexedLayer or getattr(cache, "offloading", False):
        kind = type(found).__name__ if found is not None else "absent"
        raise ContractError(
            f"accelerated attention: layer {layer} of the cache is {kind}, needs a DynamicIndexedLayer that is "
            "not offloaded; make it with DynamicCache(config=model.config)"
        )
    mine = RowLayer(latent, rope, index_dim)
    if past := found.get_seq_length():
        if index_dim and (found.indexer_keys is None or found.indexer_keys.shape[1] != past):
            raise ContractError(f"accelerated attention: layer {layer} of the cache has no index keys, needs them")
        mine.reserve(found.keys.shape[0], past, found.keys)
        kv = torch.cat([found.keys[:, 0], _side_by_side(found.values[:, 0], rope)], dim=-1)
        index = _side_by_side(found.indexer_keys, rope) if index_dim else None
        mine.write(0, kv.flatten(0, 1), None if index is None else index.flatten(0, 1), None)
        mine.advance(past)
    cache.layers[layer] = mine
    return mine


def _side_by_side(rows: Tensor, rope: int) -> Tensor:
    """The first `rope` numbers of each row from halves to pairs."""
    pairs = rows[..., :rope].unflatten(-1, (2, rope // 2)).transpose(-1, -2).flatten(-2)
    return torch.cat([pairs, rows[..., rope:]], dim=-1)
