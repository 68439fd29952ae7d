"""Small pieces that references share: the accumulator dtype and the rounding back."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["accumulate", "accumulator"]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 activations, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def accumulate(x: Tensor) -> Tensor:
    """`x` in its accumulator dtype."""
    return x.to(accumulator(x.dtype))
