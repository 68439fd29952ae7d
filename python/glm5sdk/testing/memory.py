"""Tensors between sentinels: whoever writes outside, or leaves something unwritten, is seen."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ABSENT", "HUGE", "Guarded"]

GUARD_BYTES = 256
SENTINEL = 0xA5
ABSENT = 0xFF  # NaN as a float, -1 as an integer
HUGE = 0x7B  # 1e36 as a float, two billion as an integer


class Guarded:
    """One tensor in a buffer of its own with sentinel bytes before and behind it.

    Attributes:
        tensor: contiguous, aligned like the buffer.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: int, sentinel: int = SENTINEL
    ) -> None:
        size = torch.Size(shape).numel() * dtype.itemsize
        self._buffer = torch.full((size + 2 * GUARD_BYTES,), sentinel, dtype=torch.uint8, device=device)
        self._size, self._sentinel = size, sentinel
        body = self._buffer[GUARD_BYTES : GUARD_BYTES + size]
        body.fill_(fill)
        self.tensor: Tensor = body.view(dtype).view(shape)

    @classmethod
    def holding(cls, value: Tensor) -> Guarded:
        """A copy of an input; around it lies NaN or -1, so that reading past its end shows too."""
        guarded = cls(tuple(value.shape), value.dtype, value.device, ABSENT, ABSENT)
        guarded.tensor.copy_(value)
        return guarded

    def damage(self) -> str:
        """Where a sentinel was overwritten, empty when none was."""
        before = self._buffer[:GUARD_BYTES] != self._sentinel
        behind = self._buffer[GUARD_BYTES + self._size :] != self._sentinel
        if bool(before.any()):
            return f"{GUARD_BYTES - int(before.nonzero()[0])} bytes before its start"
        if bool(behind.any()):
            return f"{int(behind.nonzero()[-1]) + 1} bytes behind its end"
        return ""
