"""RMSNorm."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from glm5sdk.ops._math import accumulate
from glm5sdk.ops._mla import scaled_rms_backward
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    elements = axes["T"] * axes["N"]
    return Cost(4 * elements, size * (elements + axes["N"]), size * elements)


def backward(grad_y: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dx, dweight = scaled_rms_backward(grad_y, x, weight, eps)
    return dx.to(x.dtype), dweight


@op(
    inputs={"x": "a[T, N]", "weight": "a[N]"},
    outputs={"y": "a[T, N]"},
    rows="T",
    grad=("x", "weight"),
    backward=backward,
    cost=cost,
    tests=TestRules(geometries=({"T": 3, "N": 6144}, {"T": 2, "N": 63}, {"T": 2, "N": 65}, {"T": 0, "N": 7})),
)
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Scale each row to unit root mean square, then by `weight`.

    y = a(a(x * rsqrt(mean(x^2) + eps)) * weight): a() one rounding to the activation dtype, the mean in the accumulator

    Args:
        x: [T, N] activations.
        weight: [N], same dtype.
        eps: added to the mean square; GLM-5 uses 1e-5 in its layers.

    Returns:
        y [T, N], dtype of x. Rows are independent; T = 0 is legal.

    Raises:
        ContractError: shapes, dtypes or devices do not fit.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467; rounding as in transformers' GlmMoeDsaRMSNorm.
    """
    acc = accumulate(x)
    r = (acc.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (acc * r).to(x.dtype) * weight
