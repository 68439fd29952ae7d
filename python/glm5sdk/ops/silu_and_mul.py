"""SwiGLU's activation: silu of the gate half times the up half."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from glm5sdk.ops._math import accumulate
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    elements = axes["T"] * axes["I"]
    return Cost(5 * elements, 2 * size * elements, size * elements)


def backward(grad_y: Tensor, x: Tensor, limit: float | None) -> Tensor:
    """With s = sigmoid(gate): d gate = g * up * s * (1 + gate * (1 - s)), d up = g * gate * s; 0 where clamped."""
    half = x.shape[-1] // 2
    raw_gate, raw_up = accumulate(x[:, :half]), accumulate(x[:, half:])
    gate, up = raw_gate, raw_up
    if limit is not None:
        gate, up = raw_gate.clamp(max=limit), raw_up.clamp(-limit, limit)
    g, sigmoid = accumulate(grad_y), gate.sigmoid()
    dx = torch.empty_like(x)
    d_gate, d_up = g * up * sigmoid * (1 + gate * (1 - sigmoid)), g * gate * sigmoid
    if limit is not None:
        d_gate, d_up = d_gate * (raw_gate <= limit), d_up * (raw_up.abs() <= limit)
    dx[:, :half], dx[:, half:] = d_gate, d_up
    return dx


@op(
    inputs={"x": "a[T, 2*I]"},
    outputs={"y": "a[T, I]"},
    rows="T",
    where=("limit is None or limit >= 0",),
    grad=("x",),
    backward=backward,
    cost=cost,
    tests=TestRules(
        geometries=({"T": 3, "I": 2048}, {"T": 2, "I": 63}, {"T": 2, "I": 65}, {"T": 1, "I": 1}, {"T": 0, "I": 7}),
        options=({}, {"limit": 10.0}, {"limit": 0.5}),
    ),
)
def silu_and_mul(x: Tensor, limit: float | None = None) -> Tensor:
    """y = a(a(silu(gate)) * up) with gate, up = the halves of x.

    Args:
        x: [T, 2I] activations: I gate columns, then I up columns.
        limit: clamp before: gate to at most `limit`, up to [-limit, limit]; None = no clamp.

    Returns:
        y [T, I], dtype of x. Rows are independent; T = 0 is legal.

    Raises:
        ContractError: the last axis is odd, the limit is negative, or dtypes do not fit.

    Source: Shazeer 2020, arXiv 2002.05202; the limit as in GLM-5.3-Flash's swiglu_limit.
    """
    half = x.shape[-1] // 2
    gate, up = x[:, :half], x[:, half:]
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    acc = accumulate(gate)
    return (acc * acc.sigmoid()).to(x.dtype) * up
