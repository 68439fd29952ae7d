"""LayerNorm with bias."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from glm5sdk.ops._mla import layer_scaled
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    elements = axes["T"] * axes["N"]
    return Cost(7 * elements, size * (elements + 2 * axes["N"]), size * elements)


@op(
    inputs={"x": "a[T, N]", "weight": "a[N]", "bias": "a[N]"},
    outputs={"y": "a[T, N]"},
    rows="T",
    grad=("x", "weight", "bias"),
    cost=cost,
    tests=TestRules(
        geometries=({"T": 3, "N": 128}, {"T": 2, "N": 63}, {"T": 2, "N": 65}, {"T": 1, "N": 1}, {"T": 0, "N": 7})
    ),
)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6) -> Tensor:
    """Centre each row, scale it to unit variance, then by `weight`, and add `bias`; the indexer's k_norm.

    y = a((x - mean) * rsqrt(var + eps) * weight + bias), var = mean((x - mean)^2), rounded once.

    Args:
        x: [T, N] activations.
        weight: [N], same dtype.
        bias: [N], same dtype.
        eps: added to the variance; 1e-6 in GLM-5's indexer, whatever the other norms use.

    Returns:
        y [T, N], dtype of x. Rows are independent; T = 0 is legal.

    Raises:
        ContractError: shapes, dtypes or devices do not fit.

    Source: Ba, Kiros and Hinton 2016, arXiv 1607.06450.
    """
    return layer_scaled(x, weight, bias, eps)
