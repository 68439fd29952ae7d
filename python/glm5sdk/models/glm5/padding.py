"""Padded batches in and out: padding is dropped before the first op and comes back as zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm5sdk.core.errors import ContractError

__all__ = ["RaggedRows", "flatten_padding"]


@dataclass(frozen=True)
class RaggedRows:
    """The real tokens of a padded batch.

    Attributes:
        keep: bool [B, S], True at real tokens.
        lengths: real tokens of each row.
    """

    keep: Tensor
    lengths: list[int]

    def pick(self, values_BS: Tensor) -> Tensor:
        """[B, S, ...] -> [T, ...]."""
        return values_BS[self.keep]

    def spread(self, values_T: Tensor) -> Tensor:
        """[T, ...] -> [B, S, ...], zeros at padding; differentiable."""
        if bool(self.keep.all()):
            return values_T.view(*self.keep.shape, *values_T.shape[1:])
        out = values_T.new_zeros(*self.keep.shape, *values_T.shape[1:])
        return out.masked_scatter(self.keep.view(*self.keep.shape, *[1] * (values_T.dim() - 1)), values_T)


def flatten_padding(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int) -> RaggedRows:
    """Read a padded batch.

    Args:
        input_ids: i64 [B, S].
        attention_mask: [B, S], 1 or True at real tokens, padding left or right; or [B, longer] whose last S columns
            count, as Hugging Face passes it while decoding. None: every token is real.
        vocab_size: ids must be below.

    Raises:
        ContractError: wrong shape or dtype, an id out of range, values other than 0 and 1, a hole inside a row.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        got = (
            f"{tuple(input_ids.shape)} {input_ids.dtype}" if isinstance(input_ids, Tensor) else type(input_ids).__name__
        )
        raise ContractError(f"model: input_ids is {got}, needs an int64 tensor [B, S]")
    batch, length = input_ids.shape
    if attention_mask is None:
        keep = torch.ones(batch, length, dtype=torch.bool, device=input_ids.device)
    else:
        keep = _read_mask(attention_mask, batch, length).to(input_ids.device)
    real = input_ids[keep]
    if real.numel() and (int(real.min()) < 0 or int(real.max()) >= vocab_size):
        bad = real[(real < 0) | (real >= vocab_size)][0]
        raise ContractError(f"model: a token id is {int(bad)}, needs 0 to {vocab_size - 1}")
    return RaggedRows(keep, keep.sum(-1).tolist())


def _read_mask(mask: Tensor, batch: int, length: int) -> Tensor:
    if not isinstance(mask, Tensor):
        raise ContractError(f"model: attention_mask is {type(mask).__name__}, needs a tensor [{batch}, {length}]")
    if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] < length:
        raise ContractError(f"model: attention_mask is {tuple(mask.shape)}, needs [{batch}, {length}]")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ContractError(
            "model: attention_mask holds values other than 0 and 1, needs 1 at real tokens and 0 at padding"
        )
    whole = mask.bool()
    changes = (whole[:, 1:] != whole[:, :-1]).sum(-1)
    holes = (changes > 2) | ((changes == 2) & whole[:, 0])
    if bool(holes.any()):
        row = int(holes.nonzero()[0])
        raise ContractError(
            f"model: row {row} of attention_mask has a hole, needs its real tokens side by side (left or right padding)"
        )
    return whole[:, whole.shape[1] - length :]
