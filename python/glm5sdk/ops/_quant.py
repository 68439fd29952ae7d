"""Scales and roundings of the quantised formats: one function per formula, shared by ops, weights and caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from glm5sdk.core.errors import ContractError

__all__ = [
    "BLOCK", "FP8", "compare_quantised", "fp8_scale", "grouped", "int4_scale", "int8_scale", "pack_int4", "quantise",
    "to_fp8", "to_int4", "to_int8", "unpack_int4",
]  # fmt: skip

BLOCK = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def fp8_scale(amax: Tensor) -> Tensor:
    """max(amax, 1e-4) / 448."""
    return amax.clamp(min=1e-4) / FP8_MAX


def int8_scale(amax: Tensor) -> Tensor:
    """max(amax, 1e-8) / 127."""
    return amax.clamp(min=1e-8) / 127.0


def int4_scale(amax: Tensor) -> Tensor:
    """max(amax, 1e-8) / 7: symmetric, so -8 is left to those who load weights that use it."""
    return amax.clamp(min=1e-8) / 7.0


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Saturating e4m3 of x / scale, to nearest even; the clamp saturates, torch's conversion alone would give NaN."""
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def to_int8(x: Tensor, scale: Tensor) -> Tensor:
    """int8 in [-127, 127] of x / scale, to nearest even."""
    return (x / scale).round().clamp(-127, 127).to(torch.int8)


def to_int4(x: Tensor, scale: Tensor) -> Tensor:
    """int8 tensor with values in [-8, 7] of x / scale, to nearest even."""
    return (x / scale).round().clamp(-8, 7).to(torch.int8)


def grouped(x: Tensor) -> Tensor:
    """[..., N] -> [..., ceil(N/128), 128], the last group filled with zeros."""
    groups = -(-x.shape[-1] // BLOCK)
    return pad(x, (0, groups * BLOCK - x.shape[-1])).unflatten(-1, (groups, BLOCK))


def pack_int4(q: Tensor) -> Tensor:
    """int8 in [-8, 7], [..., N] -> u8 [..., ceil(N/2)]; the even element lies in the low four bits."""
    pairs = pad(q, (0, q.shape[-1] % 2)).unflatten(-1, (-1, 2)).to(torch.int16) & 15
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)


def unpack_int4(packed: Tensor, n: int) -> Tensor:
    """Inverse of `pack_int4`: u8 [..., ceil(n/2)] -> int8 [..., n]."""
    wide = packed.to(torch.int16)
    pairs = torch.stack((wide & 15, wide >> 4), -1).flatten(-2)[..., :n]
    return torch.where(pairs > 7, pairs - 16, pairs).to(torch.int8)


def quantise(op: str, x: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(values in `dtype`, scale) by the formulas above.

    Raises:
        ContractError: dtype is neither int8 nor float8_e4m3fn.
    """
    if dtype == torch.int8:
        scale = int8_scale(amax)
        return to_int8(x, scale), scale
    if dtype == FP8:
        scale = fp8_scale(amax)
        return to_fp8(x, scale), scale
    raise ContractError(f"{op}: dtype is {str(dtype).removeprefix('torch.')}, needs int8 or float8_e4m3fn")


def compare_quantised(
    arguments: Mapping[str, Any], got: Sequence[Tensor], want64: Sequence[Tensor], tolerance: float
) -> None:
    """Scales to rounding; values at most one step apart, and in few places: a quotient at a tie may fall either way."""
    torch.testing.assert_close(got[1].double(), want64[1].double(), rtol=max(tolerance, 1e-6), atol=0)
    a, b = (t[0].to(torch.float64) for t in (got, want64))
    step = torch.ones_like(b) if got[0].dtype == torch.int8 else (b.abs() * 2.0**-3).clamp(min=2.0**-9)
    assert bool(((a - b).abs() <= step).all()), "a value is more than one step from the float64 one"
    assert int((a != b).sum()) <= 1 + 0.01 * a.numel(), "more values differ from the float64 ones than ties explain"
