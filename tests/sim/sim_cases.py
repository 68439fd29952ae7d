"""Schedules of the simulator and inputs that its tests share."""

from __future__ import annotations

from typing import Any

from glm5sdk.registry import CATALOGUE, use
from glm5sdk.testing.inputs import Example, arguments

ORDERS = ("fifo", "lifo", "random")
COPIES = ("late", "early", "random")
SCHEDULES = [(order, copies, seed) for order in ORDERS for copies in COPIES for seed in (0, 1)]
# One of each kind, for kernels that take long.
FEW_SCHEDULES = [("fifo", "late", 0), ("lifo", "early", 1), ("random", "random", 2), ("random", "late", 5)]

ATTENTION = {"T": 3, "H": 20, "C": 64, "R": 16, "B": 2, "M": 4, "P": 9, "S": 40, "G": 1, "K": 140}
SELECTION = {"T": 3, "Hi": 20, "Di": 24, "B": 2, "M": 4, "P": 9, "S": 40, "K": 33}


def inputs(op: str, axes: dict[str, int], dtype: str = "bf16", seed: int = 0, **given: Any) -> dict[str, Any]:
    """One example's arguments by name, some of them replaced."""
    return {**arguments(CATALOGUE[op], Example(0, tuple(axes.items()), dtype, False, seed)), **given}


def run(op: str, values: dict[str, Any], backend: str = "cuda_sim") -> tuple[Any, ...]:
    """An op's results on a backend, always as a tuple."""
    with use(backend):
        got = CATALOGUE[op](*values.values())
    return got if isinstance(got, tuple) else (got,)
