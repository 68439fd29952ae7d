"""Quantise each token with one scale."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glm5sdk.ops._math import accumulate
from glm5sdk.ops._quant import FP8, compare_quantised, quantise
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    t, n = axes["T"], axes["N"]
    return Cost(3 * t * n, size * t * n, t * n + 4 * t)


@op(
    inputs={"x": "a[T, N]"},
    outputs={"q": "dtype[T, N]", "scale": "f32[T, 1]"},
    rows="T",
    where=("N > 0",),
    cost=cost,
    tests=TestRules(
        geometries=({"T": 0, "N": 7}, {"T": 63, "N": 20}, {"T": 2, "N": 129}, {"T": 2, "N": 6144}),
        options=({"dtype": torch.int8}, {"dtype": FP8}),
        compare=compare_quantised,
    ),
)
def quantize_per_token(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """q = x / scale rounded to nearest even, one scale per token; x is about q * scale.

    int8: scale = max(amax, 1e-8) / 127, q in [-127, 127]. float8_e4m3fn: scale = max(amax, 1e-4) / 448, q saturates.

    Args:
        x: [T, N] activations.
        dtype: int8 or float8_e4m3fn.

    Returns:
        q [T, N] in dtype; scale f32 [T, 1]. `dequantize` takes both. Rows are independent; T = 0 is legal.

    Raises:
        ContractError: dtype is another one, N is 0, shapes or devices do not fit.
    """
    acc = accumulate(x)
    return quantise("quantize_per_token", acc, acc.abs().amax(-1, keepdim=True), dtype)
