"""Linear layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glm5sdk.ops._math import accumulate
from glm5sdk.ops._weights import dequantize_weight, gradient_target, project
from glm5sdk.registry import Cost, TestRules, WeightLike, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    t, n, o = axes["T"], axes["N"], axes["O"]
    return Cost(2 * t * n * o, size * (t * n + n * o), size * t * o)


def backward(
    grad_y: Tensor, x: Tensor, w: WeightLike, bias: Tensor | None, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dx = g w, dw = g^T x, dbias = sum of g, each in the accumulator, rounded once; no forward product is repeated."""
    acc = accumulate(x)
    g = grad_y.to(acc.dtype)
    dx = g @ dequantize_weight(w, acc.dtype)
    dw = g.T @ acc if isinstance(w, Tensor) else gradient_target(w, acc.dtype)
    dbias = g.sum(0) if bias is not None else g.new_zeros(g.shape[1])
    return dx.to(x.dtype), dw.to(x.dtype), dbias.to(x.dtype)


@op(
    inputs={"x": "a[T, N]", "w": "W[O, N]", "bias": "a[O]?"},
    outputs={"y": "out_dtype[T, O]"},
    rows="T",
    where=("out_dtype in (None, f32, _acc)",),
    grad=("x", "w", "bias"),
    backward=backward,
    cost=cost,
    tests=TestRules(
        geometries=(
            {"T": 0, "N": 7, "O": 5},
            {"T": 1, "N": 1, "O": 1},
            {"T": 3, "N": 63, "O": 65},
            {"T": 5, "N": 20, "O": 12},
            {"T": 63, "N": 65, "O": 64},
            {"T": 64, "N": 40, "O": 129},
            {"T": 65, "N": 129, "O": 63},
            {"T": 2, "N": 6144, "O": 576},
            {"T": 2, "N": 2048, "O": 640},
        ),
        options=({}, {"bias": None}, {"bias": None, "out_dtype": torch.float32}),
    ),
)
def linear(x: Tensor, w: WeightLike, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """y = x w^T + bias: summed in the accumulator in ascending N, bias added there, rounded once.

    Args:
        x: [T, N] activations.
        w: [O, N], plain in the dtype of x, or a Weight: w8a8 (int8 channels, int8 tokens), w4a8 (int4 groups of 128,
            int8 tokens), fp8 (128x128 blocks, e4m3 tokens by 128); see ops/_weights.py.
        bias: [O], dtype of x, or None.
        out_dtype: float32 keeps the accumulator (logits, scores); None means the dtype of x.

    Returns:
        y [T, O]. Rows are independent; T = 0 is legal. The gradient of x through a quantised weight is
        straight-through; the weight itself gets none.

    Raises:
        ContractError: shapes, dtypes or devices do not fit, out_dtype is another, or the weight's layout belongs to a
            backend.
    """
    y = project(x, w)
    if bias is not None:
        y = y + bias.to(y.dtype)
    if out_dtype == torch.float32:
        return y  # the accumulator: float64 for float64 activations
    return y.to(out_dtype or x.dtype)
