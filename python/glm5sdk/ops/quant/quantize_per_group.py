"""Quantise each token with one scale per 128 columns."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glm5sdk.ops._math import accumulate
from glm5sdk.ops._quant import FP8, compare_quantised, grouped, quantise
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    t, n = axes["T"], axes["N"]
    return Cost(3 * t * n, size * t * n, t * n + 4 * t * -(-n // 128))


@op(
    inputs={"x": "a[T, N]"},
    outputs={"q": "dtype[T, N]", "scale": "f32[T, N/128]"},
    rows="T",
    cost=cost,
    tests=TestRules(
        geometries=(
            {"T": 0, "N": 7}, {"T": 63, "N": 20}, {"T": 2, "N": 127}, {"T": 2, "N": 129}, {"T": 2, "N": 6144},
        ),
        options=({"dtype": FP8}, {"dtype": torch.int8}),
        compare=compare_quantised,
    ),
)  # fmt: skip
def quantize_per_group(x: Tensor, dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor]:
    """q = x / scale rounded to nearest even, one scale per token and 128 columns, the last group as short as it is.

    float8_e4m3fn: scale = max(amax, 1e-4) / 448, q saturates. int8: scale = max(amax, 1e-8) / 127, q in [-127, 127].

    Args:
        x: [T, N] activations.
        dtype: float8_e4m3fn or int8.

    Returns:
        q [T, N] in dtype; scale f32 [T, ceil(N/128)]. `dequantize` takes both. Rows are independent; T = 0 is legal.

    Raises:
        ContractError: dtype is another one, shapes or devices do not fit.
    """
    groups = grouped(accumulate(x))
    q, scale = quantise("quantize_per_group", groups, groups.abs().amax(-1, keepdim=True), dtype)
    return q.flatten(-2)[:, : x.shape[1]].contiguous(), scale[..., 0]
