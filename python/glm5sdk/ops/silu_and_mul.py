"""SwiGLU's activation: silu of the gate half times the up half."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from glm5sdk.ops._math import accumulate
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    elements = axes["T"] * axes["I"]
    return Cost(5 * elements, 2 * size * elements, size * elements)


@op(
    inputs={"x": "a[T, 2*I]"},
    outputs={"y": "a[T, I]"},
    rows="T",
    grad=("x",),
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
        ContractError: the last axis is odd, or dtypes do not fit.

    Source: Shazeer 2020, arXiv 2002.05202; the limit as in GLM-5.3-Flash's swiglu_limit.
    """
    half = x.shape[-1] // 2
    gate, up = x[:, :half], x[:, half:]
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    acc = accumulate(gate)
    return (acc * acc.sigmoid()).to(x.dtype) * up
