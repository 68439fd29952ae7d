"""Read quantised activations back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glm5sdk.core.errors import ContractError
from glm5sdk.ops._math import accumulator
from glm5sdk.ops._quant import BLOCK, FP8
from glm5sdk.registry import Cost, TestRules, op
from glm5sdk.registry.device import ACTIVATIONS


def cost(axes: Mapping[str, int], size: int) -> Cost:
    t, n = axes["T"], axes["N"]
    return Cost(t * n, t * n + 4 * t * axes["G"], size * t * n)


def make_inputs(axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool) -> dict[str, Any]:
    """e4m3 values, and positive scales: powers of two when exact."""
    t, n, g = axes["T"], axes["N"], axes["G"]
    scale = torch.rand(t, g, generator=generator) + 0.01
    if exact:
        scale = 2.0 ** torch.randint(-3, 4, (t, g), generator=generator)
    q = torch.randint(-8, 9, (t, n), generator=generator).float().to(FP8)
    out = dtype if dtype != torch.float64 else torch.float32
    return {"q": q, "scale": scale.to(accumulator(dtype)), "out_dtype": out}


@op(
    inputs={"q": "q8[T, N]", "scale": "f32[T, G]"},
    outputs={"x": "out_dtype[T, N]"},
    rows="T",
    where=("G == 1 or G == -(-N // 128)",),
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        ranges={"G": (1, 1)},
        geometries=(
            {"T": 0, "N": 7, "G": 1},
            {"T": 5, "N": 129, "G": 1},
            {"T": 5, "N": 129, "G": 2},
            {"T": 2, "N": 6144, "G": 48},
        ),
    ),
)
def dequantize(q: Tensor, scale: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x = q * scale, multiplied in float32 and rounded once.

    Args:
        q: int8 or float8_e4m3fn [T, N].
        scale: f32 [T, 1], one per token, or [T, ceil(N/128)], one per 128 columns.
        out_dtype: float32, bfloat16 or float16; float64 in the reference.

    Returns:
        x [T, N] in out_dtype. Rows are independent; T = 0 is legal.

    Raises:
        ContractError: scale has another number of columns, q or out_dtype another dtype, devices do not fit.
    """
    if out_dtype not in ACTIVATIONS:
        raise ContractError(f"dequantize: out_dtype is {out_dtype}, needs float32, bfloat16, float16 or float64")
    wide = scale if scale.shape[1] == 1 else scale.repeat_interleave(BLOCK, 1)[:, : q.shape[1]]
    x = q.to(scale.dtype) * wide
    return x if out_dtype == torch.float32 else x.to(out_dtype)
