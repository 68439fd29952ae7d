"""Feed-forward layers: the dense SwiGLU and the mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from glm5sdk import ops
from glm5sdk.nn.context import ForwardContext
from glm5sdk.nn.layers import Linear
from glm5sdk.nn.low_rank import ExpertLowRank
from glm5sdk.nn.routed import Part, routed_rows, run_parts
from glm5sdk.registry.weight import WeightLike

__all__ = ["MLP", "ExpertPatch", "Experts", "MixtureOfExperts", "MixtureSizes", "Router"]


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int, limit: float | None = None) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden)
        self.limit = limit

    def forward(self, x_TN: Tensor, context: ForwardContext) -> Tensor:
        gate_up = torch.cat([self.gate_proj(x_TN), self.up_proj(x_TN)], dim=-1)
        return self.down_proj(ops.silu_and_mul(gate_up, self.limit))


@dataclass(frozen=True)
class MixtureSizes:
    """Sizes and router settings of one mixture layer.

    Attributes:
        hidden, intermediate, experts, active: N, I, E, A.
        shared: width of the shared expert, 0 for none.
        groups, active_groups: n_group, topk_group.
        score: `sigmoid` or `softmax`.
        has_bias: whether a stored bias corrects the choice.
        renormalise, scale, temperature: of the route weights and logits.
        limit: clamp before SwiGLU, or None.
    """

    hidden: int
    intermediate: int
    experts: int
    active: int
    shared: int
    groups: int
    active_groups: int
    score: str
    has_bias: bool
    renormalise: bool
    scale: float
    temperature: float
    limit: float | None


class Router(nn.Module):
    """Chooses experts by score + bias and weighs them by score alone; everything in float32.

    The bias of a trained model is a large offset with a tiny spread: one rounding to bfloat16 sends most tokens to
    other experts. So weight and bias stay float32 (float64 in a float64 model) whatever the model is cast to.
    """

    e_score_correction_bias: Tensor | None

    def __init__(self, sizes: MixtureSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.weight = nn.Parameter(torch.empty(sizes.experts, sizes.hidden))
        bias = torch.zeros(sizes.experts, dtype=torch.float32) if sizes.has_bias else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x_TN: Tensor) -> tuple[Tensor, Tensor]:
        s = self.sizes
        return ops.moe_gate(
            x_TN, self.weight, self.e_score_correction_bias, s.active, s.groups, s.active_groups, s.score,
            s.renormalise, s.scale, s.temperature,
        )  # fmt: skip

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        def keep_float32(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype in (torch.float32, torch.float64) else t.to(moved.device, torch.float32)

        super()._apply(keep_float32, recurse)
        return self


@dataclass(frozen=True, eq=False)
class ExpertPatch:
    """Other weights for some experts of a layer, beside the layer's own, which are not copied.

    Attributes:
        ids: the experts, ascending, counted from the first that the module holds.
        gate_up: [P, 2I, N], in the order of `ids`.
        down: [P, N, I].
    """

    ids: tuple[int, ...]
    gate_up: WeightLike
    down: WeightLike

    def place(self, experts: int, device: torch.device) -> Tensor:
        """i64 [experts]: where each expert lies in the patch, -1 for those that are not in it."""
        place = torch.full((experts,), -1, dtype=torch.int64)
        place[list(self.ids)] = torch.arange(len(self.ids))
        return place.to(device)


class Experts(nn.Module):
    """All routed experts of a layer, fused: gate rows then up rows [E, 2I, N], and down [E, N, I].

    Attributes:
        whole: all experts of the layer are here, in memory.
        first: global id of the first expert here; other than 0 where experts are spread over processes.
        patch, adapter: set by a `WeightView` while it is active.
    """

    whole = True
    first = 0
    patch: ExpertPatch | None = None
    adapter: ExpertLowRank | None = None

    def __init__(self, sizes: MixtureSizes) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(sizes.experts, 2 * sizes.intermediate, sizes.hidden))
        self.down_proj = nn.Parameter(torch.empty(sizes.experts, sizes.hidden, sizes.intermediate))
        self.limit = sizes.limit

    @property
    def count(self) -> int:
        """Experts that this module answers for."""
        return self.weights_like()[0].shape[0]

    def weights_like(self) -> tuple[WeightLike, WeightLike]:
        """Gate-up and down weights whose kind, dtype, device and shape, but for the first axis, are this layer's."""
        return self.gate_up_proj, self.down_proj

    def expect(self, x_TN: Tensor, ids_TA: Tensor) -> None:
        """Told as soon as the router has chosen; what has to fetch its weights begins here."""

    def forward(self, x_TN: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> Tensor:
        if self.adapter is not None:
            return self.adapter(x_TN, ids_TA, weights_TA, self.gate_up_proj, self.down_proj, self.limit)
        if self.patch is None:
            return ops.moe_experts(x_TN, ids_TA, weights_TA, self.gate_up_proj, self.down_proj, self.limit)
        return routed_rows(x_TN, ids_TA, weights_TA, self.gate_up_proj.shape[0], self._run_patched)

    def _run_patched(self, rows: Tensor, owners: Tensor) -> Tensor:
        """Rows of patched experts with the patch, the others with the layer's own weights."""
        experts = self.gate_up_proj.shape[0]
        own = torch.arange(experts, device=rows.device)
        parts = [Part(own, self.gate_up_proj, self.down_proj)]
        if self.patch is not None:
            place = self.patch.place(experts, rows.device)
            parts = [
                Part(place, self.patch.gate_up, self.patch.down),
                Part(own.where(place < 0, -1), self.gate_up_proj, self.down_proj),
            ]
        return run_parts(rows, owners, parts, self.limit)


class MixtureOfExperts(nn.Module):
    """Routed experts plus the shared expert, which every token passes unscaled."""

    def __init__(self, sizes: MixtureSizes, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.gate = Router(sizes)
        self.experts = Experts(sizes)
        self.shared_experts = MLP(sizes.hidden, sizes.shared, sizes.limit) if sizes.shared else None

    def forward(self, x_TN: Tensor, context: ForwardContext) -> Tensor:
        ids_TA, weights_TA = self.gate(x_TN)
        if context.trace is not None:
            context.trace(f"layers.{self.layer}.experts", ids_TA)
        self.experts.expect(x_TN, ids_TA)
        shared_TN = None if self.shared_experts is None else self.shared_experts(x_TN, context)
        routed_TN = self.experts(x_TN, ids_TA, weights_TA)
        return routed_TN if shared_TN is None else ops.add(routed_TN, shared_TN)
