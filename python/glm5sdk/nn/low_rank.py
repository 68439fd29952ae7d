"""Low-rank additions to a weight, computed beside it: base + B (A x), each factor one op."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm5sdk import ops
from glm5sdk.registry.weight import WeightLike

__all__ = ["ExpertLowRank", "LowRank", "widened"]


def widened(tensor: Tensor) -> Tensor:
    """Float64 as it is, everything else in float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@dataclass(frozen=True, eq=False)
class LowRank:
    """An addition to one matrix [O, N].

    Rounding points: `A x` -> a; `B (A x)` -> a (or the accumulator where the base keeps it); base + addition -> a. The
    scale is part of B, multiplied in float32 and rounded once when the adapter is loaded, so it costs nothing here.

    Attributes:
        a: [r, N].
        b: [O, r], scale included.
    """

    a: Tensor
    b: Tensor

    def __call__(self, x_TN: Tensor, base_TO: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Base with the addition of these inputs, [T, O]."""
        return ops.add(base_TO, ops.linear(ops.linear(x_TN, self.a), self.b, None, out_dtype))

    def delta(self) -> Tensor:
        """What merging adds to the weight, in the accumulator [O, N]."""
        return widened(self.b) @ widened(self.a)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.a, self.b


@dataclass(frozen=True, eq=False)
class ExpertLowRank:
    """Additions to the fused experts of a layer; those that an adapter leaves alone have zeros.

    The layer runs as the ops that `moe_experts` fuses, whose bits are its own; each grouped product is followed by its
    addition with the rounding points of `LowRank`.

    Attributes:
        gate_up_a, gate_up_b: [E, r, N] and [E, 2I, r]; factors that gate and up have apart lie on the diagonal.
        down_a, down_b: [E, r, I] and [E, N, r], of another r.
    """

    gate_up_a: Tensor
    gate_up_b: Tensor
    down_a: Tensor
    down_b: Tensor

    def __call__(
        self, x_TN: Tensor, ids_TA: Tensor, weights_TA: Tensor, gate_up: WeightLike, down: WeightLike,
        limit: float | None,
    ) -> Tensor:  # fmt: skip
        """The routed sum [T, N] of experts gate_up [E, 2I, N] and down [E, N, I] with their additions."""
        rows, row_ids, offsets = ops.moe_permute(x_TN, ids_TA, gate_up.shape[0])

        def product(x: Tensor, base: WeightLike, a: Tensor, b: Tensor) -> Tensor:
            low = ops.grouped_gemm(ops.grouped_gemm(x, a, offsets), b, offsets)
            return ops.add(ops.grouped_gemm(x, base, offsets), low)

        hidden = ops.silu_and_mul(product(rows, gate_up, self.gate_up_a, self.gate_up_b), limit)
        return ops.moe_unpermute(product(hidden, down, self.down_a, self.down_b), row_ids, weights_TA)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.gate_up_a, self.gate_up_b, self.down_a, self.down_b
