"""Inputs and comparisons that the kernel tests share."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BF16_PRODUCTS", "FLOATS", "UNIT", "bits_equal", "draw", "within"]

BF16_PRODUCTS = 4  # the level from which bf16 is multiplied as such
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
UNIT = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Normal values of a fixed seed, rounded to `dtype`."""
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Same dtype, shape and bits; NaN equals the same NaN, 0 differs from -0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def within(got: Tensor, want: Tensor, dtype: torch.dtype, scale: Tensor | None = None, roundings: float = 4) -> None:
    """Fail unless |got - want| is a few roundings of `dtype` at the size of `want` (or of `scale`)."""
    size = want.abs() if scale is None else scale
    error = (got.double() - want.double()).abs()
    assert bool((error <= roundings * UNIT[dtype] * size.double() + 1e-7).all()), f"off by up to {error.max()}"
