"""Walsh-Hadamard rotation: spreads outliers over a row before it is quantised."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glm5sdk.ops._math import accumulate
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    t, n = axes["T"], axes["N"]
    return Cost(t * n * max(1, n.bit_length() - 1) + t * n, size * t * n, size * t * n)


def rotate(x: Tensor) -> Tensor:
    acc, width, stride = accumulate(x), x.shape[1], 1
    while stride < width:
        pairs = acc.unflatten(1, (width // (2 * stride), 2, stride))
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        acc = torch.stack((low + high, low - high), 2).flatten(1)
        stride *= 2
    return (acc * width**-0.5).to(x.dtype)


def backward(grad_y: Tensor, x: Tensor) -> Tensor:
    """The matrix is symmetric: the gradient is rotated like the input."""
    return rotate(grad_y)


@op(
    inputs={"x": "a[T, N]"},
    outputs={"y": "a[T, N]"},
    rows="T",
    grad=("x",),
    where=("N > 0 and N & (N - 1) == 0",),
    backward=backward,
    cost=cost,
    tests=TestRules(
        ranges={"N": (1, 1)},
        geometries=({"T": 0, "N": 8}, {"T": 3, "N": 2}, {"T": 65, "N": 64}, {"T": 63, "N": 128}, {"T": 2, "N": 2048}),
    ),
)
def hadamard(x: Tensor) -> Tensor:
    """y = x H / sqrt(N), H the Sylvester-Hadamard matrix: orthogonal and its own inverse.

    log2(N) butterfly steps with strides 1, 2, 4, ... in the accumulator, the scale last, rounded once. GLM-5's indexer
    rotates its queries and keys of 128 so before float8; dot products do not change.

    Args:
        x: [T, N] activations, N a power of two.

    Returns:
        y [T, N], dtype of x. Rows are independent; T = 0 is legal.

    Raises:
        ContractError: N is no power of two; dtypes do not fit.

    Source: the fast transform as in fast_hadamard_transform's `hadamard_transform(x, scale=N**-0.5)`.
    """
    return rotate(x)
