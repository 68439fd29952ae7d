"""Residual addition and RMSNorm of the sum in one pass."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from glm5sdk.ops._math import accumulate
from glm5sdk.ops._mla import scaled_rms, scaled_rms_backward
from glm5sdk.ops.norm.add import add
from glm5sdk.ops.norm.rms_norm import rms_norm
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    elements = axes["T"] * axes["N"]
    return Cost(5 * elements, size * (2 * elements + axes["N"]), 2 * size * elements)


def composed(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = add(x, residual)
    return rms_norm(total, weight, eps), total


def backward(
    grad_y: Tensor, grad_residual_out: Tensor, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Both addends get the gradient of their sum."""
    total = (accumulate(x) + accumulate(residual)).to(x.dtype)
    dx, dweight = scaled_rms_backward(grad_y, total, weight, eps)
    dx = dx.add_(grad_residual_out).to(x.dtype)
    return dx, dx.clone(), dweight


@op(
    inputs={"x": "a[T, N]", "residual": "a[T, N]", "weight": "a[N]"},
    outputs={"y": "a[T, N]", "residual_out": "a[T, N]"},
    rows="T",
    grad=("x", "residual", "weight"),
    backward=backward,
    composed=composed,
    cost=cost,
    tests=TestRules(geometries=({"T": 3, "N": 6144}, {"T": 2, "N": 63}, {"T": 2, "N": 65}, {"T": 0, "N": 7})),
)
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream and normalise the rounded sum; bit-equal to `add` then `rms_norm`.

    residual_out = a(x + residual); y = rms_norm(residual_out, weight, eps).

    Args:
        x: [T, N] activations.
        residual: [T, N], same dtype.
        weight: [N], same dtype.
        eps: added to the mean square.

    Returns:
        y [T, N] and residual_out [T, N], dtype of x. Nothing is written in place. Rows are independent.

    Raises:
        ContractError: shapes, dtypes or devices do not fit.
    """
    total = (accumulate(x) + accumulate(residual)).to(x.dtype)
    return scaled_rms(total, weight, eps), total
