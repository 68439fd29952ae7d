"""TokenBatch: one step's tokens, flattened, each with its request, position and what it may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5sdk.core.errors import ContractError

__all__ = ["TokenBatch"]


@dataclass(frozen=True)
class TokenBatch:
    """The only description of tokens that attention sees: prefill, chunk, decode, verification and training alike.

    Attributes:
        positions: i64 [T], position within the request.
        request_ids: i32 [T], row of block_table.
        kv_lens: i32 [T], how many keys the token may see: position + 1.
        slots: i64 [T], physical row page * page_size + offset of the token's own cache row.
        block_table: i32 [B, M], physical page of each logical page.
        max_kv_len: largest of kv_lens, known to the host.
    """

    positions: Tensor
    request_ids: Tensor
    kv_lens: Tensor
    slots: Tensor
    block_table: Tensor
    max_kv_len: int

    @classmethod
    def packed(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> TokenBatch:
        """Whole sequences one behind the other, no cache: pages of one token, so the step's own rows are the cache.

        Args:
            lengths: tokens of each sequence, in order.
            device: where the tensors go.
        """
        count = torch.tensor(list(lengths), dtype=torch.int64)
        starts = count.cumsum(0) - count
        longest = int(count.max()) if len(lengths) else 0
        table = starts[:, None] + torch.arange(longest)
        table = table.where(torch.arange(longest) < count[:, None], 0)
        return cls._build(torch.zeros_like(count), count, table.to(torch.int32), 1, device)

    @classmethod
    def paged(cls, past: Sequence[int], lengths: Sequence[int], block_table: Tensor, page_size: int) -> TokenBatch:
        """New tokens of requests whose earlier tokens are cached.

        Args:
            past: cached tokens of each request.
            lengths: new tokens of each request; 0 is legal.
            block_table: i32 [B, M] with room for past + new tokens.
            page_size: tokens a page.
        """
        room = block_table.shape[1] * page_size
        for request, (old, new) in enumerate(zip(past, lengths, strict=True)):
            if old + new > room:
                raise ContractError(f"token batch: request {request} is {old + new} tokens long, needs at most {room}")
        counts = (torch.tensor(list(values), dtype=torch.int64) for values in (past, lengths))
        return cls._build(*counts, block_table, page_size, block_table.device)

    @classmethod
    def _build(
        cls, past: Tensor, count: Tensor, block_table: Tensor, page_size: int, device: torch.device | str
    ) -> TokenBatch:
        request_ids = torch.arange(len(count)).repeat_interleave(count)
        starts = count.cumsum(0) - count
        positions = torch.arange(len(request_ids)) - starts[request_ids] + past[request_ids]
        table = block_table.cpu()
        pages = table[request_ids, positions // page_size].to(torch.int64) if len(request_ids) else positions
        slots = pages * page_size + positions % page_size
        longest = int(positions.max()) + 1 if len(positions) else 0
        return cls(
            positions.to(device),
            request_ids.to(device, torch.int32),
            (positions + 1).to(device, torch.int32),
            slots.to(device),
            block_table.to(device),
            longest,
        )
