"""Rows of paged caches: reading and writing each format, and which keys each token may see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5sdk.ops._checks import check_range, check_selection
from glm5sdk.ops._math import accumulate
from glm5sdk.ops._quant import BLOCK, FP8, fp8_scale, grouped, to_fp8

__all__ = [
    "KeyGroup",
    "key_groups",
    "read_index_rows",
    "read_kv_rows",
    "selected_slots",
    "write_index_rows",
    "write_kv_rows",
]


def dequantised(codes: Tensor, scales: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """e4m3 bytes [n, D] times one f32 scale per `group` of them, in `dtype`: one product each."""
    return (
        codes.clone(memory_format=torch.contiguous_format).view(FP8).to(dtype)
        * scales.to(dtype).repeat_interleave(group, -1)[:, : codes.shape[1]]
    )


def as_bytes(x: Tensor) -> Tensor:
    """[n, k] of any dtype as u8 [n, k * itemsize]."""
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def from_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """u8 [n, k * itemsize] as [n, k] of `dtype`; copied, since a slice of bytes may be misaligned."""
    if x.shape[1] == 0:
        return torch.empty(x.shape, dtype=dtype, device=x.device)  # no rope part; an empty row has no stride to view
    return x.clone(memory_format=torch.contiguous_format).view(dtype)


def put(target: Tensor, index: Tensor | tuple[Tensor, ...], values: Tensor) -> None:
    """Write in place, also to a cache made in inference mode from outside of it: no gradient ever passes here."""
    with torch.inference_mode(torch.is_inference_mode_enabled() or target.is_inference()):
        target[index] = values


# KV rows: latent C, then rope R.


def write_kv_rows(cache: Tensor, slots: Tensor, rows: Tensor, v_dim: int, format: str) -> None:
    """Write rows [n, C + R] (rounded to the activation dtype) to their slots; slots are >= 0 and checked.

    Args:
        cache: `plain` [P, S, C + R] or `fp8_ds_mla` u8 [P, S, bytes]; written in place.
        slots: [n] i64 physical rows, page * S + offset.
        rows: [n, C + R].
        v_dim: C.
        format: the cache's format.
    """
    flat = cache.view(cache.shape[0] * cache.shape[1], cache.shape[2])
    if format == "plain":
        put(flat, slots, rows)
        return
    groups = grouped(accumulate(rows[:, :v_dim]))
    scales = fp8_scale(groups.abs().amax(-1)).float()
    codes = to_fp8(groups, scales[..., None].to(groups.dtype)).flatten(1)[:, :v_dim]
    parts = [as_bytes(codes), as_bytes(scales), as_bytes(rows[:, v_dim:].to(torch.bfloat16))]
    put(flat, slots, torch.cat(parts, dim=1))


def read_kv_rows(cache: Tensor, slots: Tensor, v_dim: int, format: str, dtype: torch.dtype) -> Tensor:
    """Rows of a KV cache in `dtype` [n, C + R]; arguments as `write_kv_rows`."""
    flat = cache.view(cache.shape[0] * cache.shape[1], cache.shape[2])
    rows = flat.index_select(0, slots)
    if format == "plain":
        return rows.to(dtype)
    groups = -(-v_dim // BLOCK)
    codes, scales, rope = torch.split(rows, [v_dim, 4 * groups, rows.shape[1] - v_dim - 4 * groups], dim=1)
    latent = dequantised(codes, from_bytes(scales, torch.float32), BLOCK, dtype)
    return torch.cat([latent, from_bytes(rope, torch.bfloat16).to(dtype)], dim=1)


# Index keys.


def _index_parts(cache: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Views of an fp8 index cache: bytes [P, S, Di] (all of a page first), scale bytes [P, S, 4]."""
    pages, size = cache.shape[0], cache.shape[1] // (dim + 4)
    codes, scales = torch.split(cache, [size * dim, size * 4], dim=1)
    return codes.view(pages, size, dim), scales.view(pages, size, 4)


def write_index_rows(cache: Tensor, slots: Tensor, rows: Tensor, format: str) -> None:
    """Write index keys [n, Di] to their slots; slots are >= 0 and checked.

    Args:
        cache: `plain` [P, S, Di] or `fp8` u8 [P, S * (Di + 4)]; written in place.
        slots: [n] i64 physical rows, page * S + offset.
        rows: [n, Di].
        format: the cache's format.
    """
    if slots.numel() == 0:
        return
    if format == "plain":
        put(cache.view(cache.shape[0] * cache.shape[1], cache.shape[2]), slots, rows)
        return
    codes, scales = _index_parts(cache, rows.shape[1])
    page, offset = slots // codes.shape[1], slots % codes.shape[1]
    acc = accumulate(rows)
    scale = fp8_scale(acc.abs().amax(-1, keepdim=True)).float()
    put(codes, (page, offset), as_bytes(to_fp8(acc, scale.to(acc.dtype))))
    put(scales, (page, offset), as_bytes(scale))


def read_index_rows(cache: Tensor, slots: Tensor, dim: int, format: str, dtype: torch.dtype) -> Tensor:
    """Index keys in `dtype` [n, Di]; arguments as `write_index_rows`."""
    if format == "plain":
        return cache.view(cache.shape[0] * cache.shape[1], dim).index_select(0, slots).to(dtype)
    if slots.numel() == 0:
        return torch.zeros(0, dim, dtype=dtype, device=cache.device)
    codes, scales = _index_parts(cache, dim)
    page, offset = slots // codes.shape[1], slots % codes.shape[1]
    return dequantised(codes[page, offset], from_bytes(scales[page, offset], torch.float32), dim, dtype)


# Who sees what.

_CHUNK = 64


@dataclass(frozen=True)
class KeyGroup:
    """Some rows of one request and the keys they look at, together.

    Attributes:
        rows: [t] i64 places of the rows in the call.
        positions: [n] i64 logical positions of the keys, ascending.
        slots: [n] i64 where those keys lie in the cache.
        visible: [t, G, n] bool, which row sees which key.
    """

    rows: Tensor
    positions: Tensor
    slots: Tensor
    visible: Tensor

    def chunks(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """64 rows at a time: (their places, visible [64, G, n], n), the keys past the n-th being visible to none.

        Causal rows see a prefix, so most chunks need less than all keys; and what a chunk computes stays in cache.
        """
        for rows, visible in zip(self.rows.split(_CHUNK), self.visible.split(_CHUNK), strict=True):
            seen = visible.flatten(0, 1).any(0).nonzero()
            n = int(seen[-1]) + 1 if len(seen) else 0
            yield rows, visible[..., :n], n


def key_groups(
    op: str,
    block_table: Tensor,
    request_ids: Tensor,
    pages: int,
    page_size: int,
    *,
    kv_lens: Tensor | None = None,
    indices: Tensor | None = None,
    width: int = 1,
    budget: int = 1 << 25,
) -> Iterator[KeyGroup]:
    """Split a call into groups of rows that share a request, after checking every value it depends on.

    Args:
        op: the op's name, for errors.
        block_table: [B, M] i32.
        request_ids: [T] i32, -1 = padding row, in no group.
        pages: pages in the pool, P.
        page_size: tokens a page, S.
        kv_lens: [T] i32; with `indices` an upper bound on them, without them what each row sees.
        indices: [T, G, K] i32 selections, strictly ascending, then -1.
        width: elements the caller computes per (row, key).
        budget: elements a group may cost; every group has at least one row.

    Yields:
        Groups with at least one key, requests ascending, rows in call order. Rows that see no key are in no group or
        see nothing in it.

    Raises:
        ContractError: a request, length, selection or page is out of range; raised before the first group.
    """
    requests, logical_pages = block_table.shape
    capacity = logical_pages * page_size
    check_range(op, "request_ids", request_ids, -1, requests, "requests in the block table")
    live = request_ids >= 0
    if kv_lens is not None:
        check_range(op, "kv_lens", torch.where(live, kv_lens, 0), 0, capacity + 1, "tokens its pages hold, plus 1")
    if indices is not None:
        limit = kv_lens if kv_lens is not None else torch.full_like(request_ids, capacity)
        check_selection(op, indices, live, limit)
    plans = []
    for request in torch.unique(request_ids[live]).tolist():
        rows = (request_ids == request).nonzero()[:, 0]
        if indices is not None:
            here = indices.index_select(0, rows).long()
            positions = torch.unique(here[here >= 0])
        else:
            assert kv_lens is not None
            positions = torch.arange(int(kv_lens[rows].max()), device=rows.device)
        if positions.numel() == 0:
            continue
        page = block_table[request].long().index_select(0, positions // page_size)
        check_range(op, f"block_table[{request}]: the page of a key", page, 0, pages, "pages in the pool")
        plans.append((rows, positions, page * page_size + positions % page_size))
    for rows, positions, slots in plans:
        step = max(1, budget // (width * len(positions)))
        for chunk in rows.split(step):
            yield KeyGroup(chunk, positions, slots, _visible(chunk, positions, kv_lens, indices))


def selected_slots(
    op: str,
    block_table: Tensor,
    request_ids: Tensor,
    pages: int,
    page_size: int,
    kv_lens: Tensor,
    indices: Tensor,
) -> tuple[Tensor, Tensor]:
    """Where each row's own selection lies in the cache, after the checks of `key_groups`; arguments as there.

    Returns:
        slots i64 [T, G, K], 0 where absent; bool [T, G, K], whether the entry is there: not -1, in no padding row.

    Raises:
        ContractError: as `key_groups`.
    """
    requests, logical_pages = block_table.shape
    check_range(op, "request_ids", request_ids, -1, requests, "requests in the block table")
    live = request_ids >= 0
    check_range(op, "kv_lens", torch.where(live, kv_lens, 0), 0, logical_pages * page_size + 1, "tokens its pages hold")
    check_selection(op, indices, live, kv_lens)
    present = (indices >= 0) & live[:, None, None]
    here = torch.where(present, indices, 0).long()
    if not bool(present.any()):
        return here, present
    table = block_table.index_select(0, request_ids.clamp_min(0).long())[:, None].expand(-1, indices.shape[1], -1)
    page = torch.where(present, table.gather(2, here // page_size), 0).long()
    check_range(op, "block_table: the page of a key", page, 0, pages, "pages in the pool")
    return page * page_size + torch.where(present, here % page_size, 0), present


def _visible(rows: Tensor, positions: Tensor, kv_lens: Tensor | None, indices: Tensor | None) -> Tensor:
    if indices is None:
        assert kv_lens is not None
        return (positions < kv_lens.index_select(0, rows)[:, None])[:, None]
    here = indices.index_select(0, rows).long()
    place = torch.searchsorted(positions, here.clamp_min(0))
    place = torch.where(here >= 0, place, len(positions))  # absent entries go to a column of their own
    seen = torch.zeros(*here.shape[:2], len(positions) + 1, dtype=torch.bool, device=rows.device)
    return seen.scatter_(-1, place, True)[..., :-1]
