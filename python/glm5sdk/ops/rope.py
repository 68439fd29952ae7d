"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from glm5sdk.ops._checks import check_range
from glm5sdk.ops._mla import rotate
from glm5sdk.ops._test_inputs import rope_inputs
from glm5sdk.registry import Cost, TestRules, op


def cost(axes: Mapping[str, int], size: int) -> Cost:
    elements = axes["T"] * axes["H"] * axes["R"]
    return Cost(3 * elements, size * elements + axes["T"] * (4 * axes["R"] + 8), size * elements)


def make_inputs(axes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator, exact: bool) -> dict[str, Any]:
    interleaved = bool(torch.randint(2, (), generator=generator))
    return {**rope_inputs(axes, dtype, generator, exact), "interleaved": interleaved}


@op(
    inputs={"x": "a[T, H, R]", "positions": "i64[T]", "cos_sin": "f32[Pmax, R]"},
    outputs={"y": "a[T, H, R]"},
    rows="T",
    where=("R % 2 == 0",),
    grad=("x",),
    cost=cost,
    tests=TestRules(
        make_inputs=make_inputs,
        ranges={"R": (2, 2), "Pmax": (1, 9)},
        geometries=(
            {"T": 2, "H": 64, "R": 64, "Pmax": 4096},
            {"T": 3, "H": 1, "R": 6, "Pmax": 1},
            {"T": 5, "H": 3, "R": 66, "Pmax": 9},
            {"T": 0, "H": 2, "R": 4, "Pmax": 3},
        ),
    ),
)
def rope(x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = True) -> Tensor:
    """Rotate pairs of the last axis by the angles of each token's position; pairs stay in place.

    Interleaved pairs are (x0, x1), (x2, x3), ...; otherwise pair j is (x[j], x[j + R/2]). A pair (a, b) becomes
    (a cos - b sin, b cos + a sin): float32 tables, accumulator arithmetic, one rounding. Hugging Face's interleaved
    form emits evens then odds: never compare caches with it byte for byte.

    Args:
        x: [T, H, R] activations, R even.
        positions: [T] i64, 0 <= position < Pmax.
        cos_sin: [Pmax, R] f32: cosines of the R/2 angles, then their sines.
        interleaved: which elements form a pair; true for GLM-5, false for DeepSeek-V3.2's indexer.

    Returns:
        y [T, H, R], dtype of x. Rows are independent; T = 0 is legal.

    Raises:
        ContractError: shapes, dtypes or devices do not fit, R is odd, or a position is outside the table.

    Source: Su et al. 2021, arXiv 2104.09864.
    """
    check_range("rope", "positions", positions, 0, cos_sin.shape[0], "rows of cos_sin")
    return rotate(x, positions, cos_sin, interleaved)
