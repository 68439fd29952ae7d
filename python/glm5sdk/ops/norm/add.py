"""Residual addition."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from glm5sdk.ops._math import accumulate
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    elements = axes["T"] * axes["N"]
    return Cost(elements, 2 * size * elements, size * elements)


@op(
    inputs={"x": "a[T, N]", "y": "a[T, N]"},
    outputs={"z": "a[T, N]"},
    rows="T",
    grad=("x", "y"),
    cost=cost,
    tests=TestRules(geometries=({"T": 2, "N": 6144}, {"T": 3, "N": 65}, {"T": 1, "N": 1}, {"T": 0, "N": 7})),
)
def add(x: Tensor, y: Tensor) -> Tensor:
    """Sum of two activations, added in the accumulator and rounded once.

    Args:
        x: [T, N] activations, e.g. the residual stream.
        y: [T, N], same dtype.

    Returns:
        z [T, N], dtype of x. Rows are independent; T = 0 is legal.

    Raises:
        ContractError: shapes, dtypes or devices do not fit.
    """
    return (accumulate(x) + accumulate(y)).to(x.dtype)
