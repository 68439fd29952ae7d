"""One row of the table of ops: what to run, what it competes with, how it is checked, what it should reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from glm5sdk import ops
from glm5sdk.registry import Cost, get_op

Arguments = tuple[Any, ...]


@dataclass
class Case:
    """An op at one size.

    Attributes:
        op: its name.
        preset: what the size stands for, as printed.
        kind: dtype of its products: bf16 or int8; which ceiling it is compared with.
        cost: least work of one call.
        inputs: arguments of ours, one tuple a set of the rotation.
        eager: torch compositions, by name; each takes the arguments of `torch_inputs`.
        torch_inputs: as `inputs`, for torch.
        compiled: which of `eager` torch.compile also tries.
        check: result of set 0 -> why it is wrong, or "".
        speed: target, times the best composition; None has none.
        roof: target share of the roofline.
        against: targets against one composition by name.
        products: for an op that may run composed: the op of its products and arguments that it would get, which tell
            the level that computes them.
    """

    op: str
    preset: str
    cost: Cost
    inputs: list[Arguments]
    torch_inputs: list[Arguments]
    eager: Mapping[str, Callable[..., Any]]
    check: Callable[[Any], str]
    speed: float | None = None
    roof: float | None = None
    kind: str = "bf16"
    compiled: tuple[str, ...] = ()
    against: Mapping[str, float | None] = field(default_factory=dict)
    products: tuple[str, Arguments] | None = None

    def ours(self, n: int) -> Any:
        """One call on set n."""
        return getattr(ops, self.op)(*self.inputs[n])

    def implementation(self) -> tuple[str, str]:
        """Which one runs now, and which one computes its products."""
        chosen = get_op(self.op).explain(*self.inputs[0]).chosen
        if chosen != "composed" or self.products is None:
            return chosen, chosen
        op, arguments = self.products
        return chosen, get_op(op).explain(*arguments).chosen


def filled(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random normal numbers; large tensors repeat a prime number of them: quick to draw, yet no two rows are alike."""
    size, block = 1, 1_048_583
    for n in shape:
        size *= n
    drawn = torch.randn(min(size, block), generator=torch.Generator().manual_seed(seed)).mul_(scale).to(dtype)
    out = torch.empty(size, dtype=dtype)
    for begin in range(0, size, block):
        out[begin : begin + block] = drawn[: size - begin]
    return out.view(*shape)


def far(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str:
    """Why `got` is not `want` within a relative error in the 2-norm, or ""."""
    if got.shape != want.shape:
        return f"shape is {tuple(got.shape)}, needs {tuple(want.shape)}"
    want = want.double()
    error = float((got.double() - want).norm() / want.norm().clamp_min(1e-30))
    return "" if error <= tolerance else f"relative error is {error:.2e}, needs at most {tolerance:.0e}"
