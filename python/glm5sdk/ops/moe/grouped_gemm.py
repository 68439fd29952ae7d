"""One product per expert over rows sorted by expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glm5sdk.ops._math import accumulator
from glm5sdk.ops._weights import dequantize_weight, experts, gradient_target, project
from glm5sdk.ops.moe._sort import to_bounds
from glm5sdk.registry import Cost, TestRules, WeightLike, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    m, n, o, e = axes["M"], axes["N"], axes["O"], axes["E"]
    return Cost(2 * m * n * o, size * (m * n + min(e, m) * n * o) + 4 * (e + 1), size * m * o)


def make_inputs(axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool) -> dict[str, Any]:
    """Offsets over most rows; experts without rows are common."""
    m, e = axes["M"], axes["E"]
    used = int(torch.randint(max(0, m - 3), m + 1, (), generator=generator))
    cuts = torch.randint(0, used + 1, (e - 1,), generator=generator).sort().values
    return {"offsets": torch.cat((torch.tensor([0]), cuts, torch.tensor([used]))).to(torch.int32)}


def backward(grad_y: Tensor, x: Tensor, w: WeightLike, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Per expert dx = g w and dw = g^T x, in the accumulator."""
    acc = accumulator(x.dtype)
    bounds = to_bounds("grouped_gemm", offsets, x.shape[0])
    dx, dw = torch.zeros_like(x), gradient_target(w, acc)
    for e, weight in enumerate(experts(w)):
        mine = slice(bounds[e], bounds[e + 1])
        if mine.start == mine.stop:
            continue
        g = grad_y[mine].to(acc)
        dx[mine] = (g @ dequantize_weight(weight, acc)).to(x.dtype)
        if isinstance(w, Tensor):
            torch.mm(g.T, x[mine].to(acc), out=dw[e])
    return dx, dw.to(x.dtype)


@op(
    inputs={"x": "a[M, N]", "w": "W[E, O, N]", "offsets": "i32[E+1]"},
    outputs={"y": "a[M, O]"},
    rows=None,
    grad=("x", "w"),
    backward=backward,
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        ranges={"M": (0, 20)},
        geometries=(
            {"M": 0, "N": 7, "O": 5, "E": 3},
            {"M": 1, "N": 1, "O": 1, "E": 1},
            {"M": 63, "N": 20, "O": 12, "E": 5},
            {"M": 64, "N": 65, "O": 63, "E": 2},
            {"M": 65, "N": 63, "O": 65, "E": 1},
            {"M": 3, "N": 40, "O": 12, "E": 256},
            {"M": 5, "N": 6144, "O": 64, "E": 3},
            {"M": 5, "N": 2048, "O": 65, "E": 3},
        ),
    ),
)
def grouped_gemm(x: Tensor, w: WeightLike, offsets: Tensor) -> Tensor:
    """y[r] = x[r] w[e]^T for the expert e that owns row r; rounding as in `linear`.

    Args:
        x: [M, N] activations, sorted by expert.
        w: [E, O, N]; kinds as in `linear`.
        offsets: i32 [E+1], ascending from 0: expert e owns rows offsets[e] to offsets[e+1], none if they are equal.

    Returns:
        y [M, O], dtype of x; rows from offsets[E] on are 0 and their x is not read. A row's bits do not depend on the
        other rows. M = 0 is legal.

    Raises:
        ContractError: offsets do not ascend from 0 to at most M; shapes, dtypes or devices do not fit.
    """
    bounds = to_bounds("grouped_gemm", offsets, x.shape[0])
    y = x.new_zeros(x.shape[0], w.shape[1])
    for e, weight in enumerate(experts(w)):
        if bounds[e] < bounds[e + 1]:
            y[bounds[e] : bounds[e + 1]] = project(x[bounds[e] : bounds[e + 1]], weight).to(x.dtype)
    return y
