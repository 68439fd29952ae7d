"""From transformers' attention mask to a TokenBatch: who sees which keys, read once and shared by all layers."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5.padding import RaggedRows
from glm5sdk.nn.token_batch import TokenBatch

__all__ = ["Step", "StepReader"]


@dataclass(frozen=True)
class Step:
    """One forward pass as our attention sees it.

    Attributes:
        batch: the tokens that see anything, flattened; cache pages of one row.
        rows: which of the [B, S] tokens those are; None means all.
        table_rows: rows of a rotary table that are enough.
    """

    batch: TokenBatch
    rows: RaggedRows | None
    table_rows: int

    def pick(self, values_BSN: Tensor) -> Tensor:
        """[B, S, N] -> [T, N]."""
        return values_BSN.flatten(0, 1) if self.rows is None else self.rows.pick(values_BSN)

    def spread(self, values_TN: Tensor, like_BSN: Tensor) -> Tensor:
        """[T, N] -> [B, S, N], zeros where a token sees nothing."""
        return values_TN.view(like_BSN.shape) if self.rows is None else self.rows.spread(values_TN)


class StepReader:
    """Makes Steps and remembers the last one: all layers of a pass ask with the same tensors."""

    def __init__(self) -> None:
        # One tuple, replaced at once: threads may share a model.
        self._last: tuple[tuple[object, ...], weakref.ref[Tensor], weakref.ref[Tensor], Step] | None = None

    def __call__(self, mask: Tensor | None, position_ids: Tensor | None, batch: int, past: int, pool: int) -> Step:
        """The step of these arguments of an attention module.

        Args:
            mask: [B or 1, 1, S, past + S], True or 0 where a query sees a key.
            position_ids: [B or 1, S].
            batch: B.
            past: columns in the cache before this pass.
            pool: rows each request has in the cache's buffer; 0: keys are this pass's own rows.

        Raises:
            ContractError: the mask is of another form, or sees keys in no order of positions.
        """
        mask, position_ids = _checked(mask, position_ids)
        key = (batch, past, pool, mask._version, position_ids._version)
        last = self._last
        if last is None or last[0] != key or last[1]() is not mask or last[2]() is not position_ids:
            step = _read(mask, position_ids, batch, past, pool)
            self._last = last = key, weakref.ref(mask), weakref.ref(position_ids), step
        return last[3]

    def __deepcopy__(self, memo: object) -> StepReader:
        return StepReader()

    def __reduce__(self) -> tuple[type[StepReader], tuple[()]]:
        return StepReader, ()


def _checked(mask: Tensor | None, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] != 1:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ContractError(f"accelerated attention: attention_mask is {got}, needs [B, 1, S, keys], one for all heads")
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2:
        raise ContractError(
            "accelerated attention: position_ids is "
            f"{tuple(position_ids.shape) if isinstance(position_ids, Tensor) else type(position_ids).__name__}, "
            "needs [B, S]"
        )
    return mask, position_ids


def _read(mask: Tensor, position_ids: Tensor, batch: int, past: int, pool: int) -> Step:
    sees = _visible(mask).expand(batch, -1, -1)
    _, length, columns = sees.shape
    if columns != past + length:
        raise ContractError(
            f"accelerated attention: attention_mask has {columns} keys, needs {past + length}: "
            f"{past} cached and {length} new ones"
        )
    count = sees.sum(-1)
    keep = count > 0
    real = sees.any(1)
    rank = real.cumsum(-1) - 1
    first = sees.to(torch.uint8).argmax(-1)
    start = rank.gather(1, first).where(keep, 0)
    _check_order(sees, real, rank, start, count)
    own = torch.arange(columns, device=mask.device)
    if pool:
        row_of = torch.arange(batch, device=mask.device)[:, None] * pool + own
    elif bool((real & ~keep).any()):
        raise ContractError("accelerated attention: a token is seen but sees nothing, needs to see itself")
    else:
        row_of = keep.flatten().cumsum(0).view(batch, length) - 1
    # A request is a run of keys: one a row, or several where sequences are packed into it.
    wanted = torch.arange(batch, device=mask.device)[:, None] * columns + start
    requests, request_ids = torch.unique(wanted[keep], return_inverse=True)
    longest = int(count.max()) if count.numel() else 0
    order = torch.argsort((~real).to(torch.uint8), dim=1, stable=True)
    at = (requests % columns)[:, None] + own[:longest]
    table = row_of.gather(1, order)[requests // columns].gather(1, at.clamp(max=columns - 1))
    positions = position_ids.expand(batch, -1)
    slots = row_of[:, past:] if pool else row_of
    everything = bool(keep.all())
    token_batch = TokenBatch(
        positions[keep].to(torch.int64),
        request_ids.to(torch.int32),
        count[keep].to(torch.int32),
        slots[keep],
        table.to(torch.int32).contiguous(),
        longest,
    )
    rows = None if everything else RaggedRows(keep, keep.sum(-1).tolist())
    return Step(token_batch, rows, int(position_ids.max()) + 1 if position_ids.numel() else 1)


def _visible(mask: Tensor) -> Tensor:
    """bool [B, S, keys]; a float mask holds 0 and its dtype's lowest numbers, anything else would be a bias."""
    if mask.dtype == torch.bool:
        return mask[:, 0]
    sees = mask == 0
    if not bool((sees | (mask < torch.finfo(mask.dtype).min / 2)).all()):
        raise ContractError(
            "accelerated attention: attention_mask holds values between 0 and minus infinity, "
            "needs 0 at visible keys and the lowest number elsewhere"
        )
    return sees[:, 0]


def _check_order(sees: Tensor, real: Tensor, rank: Tensor, start: Tensor, count: Tensor) -> None:
    """Each query sees a run of consecutive keys, among the keys of its row that anyone sees."""
    end = start + count
    run = real[:, None] & (rank[:, None] >= start[..., None]) & (rank[:, None] < end[..., None])
    if not torch.equal(run, sees):
        raise ContractError(
            "accelerated attention: attention_mask lets a query skip keys that others see, needs causal masks: "
            "padding and packed sequences are fine, windows and trees are not"
        )
