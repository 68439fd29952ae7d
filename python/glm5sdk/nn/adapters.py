"""LoRA adapters: a PEFT folder becomes additions to a model's matrices, applied beside them or merged into them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.nn.adapter_files import WEIGHTS, AdapterSettings, read_pairs, read_settings
from glm5sdk.nn.layers import Linear
from glm5sdk.nn.low_rank import ExpertLowRank, LowRank, widened
from glm5sdk.nn.moe import Experts
from glm5sdk.registry.weight import load_weight

__all__ = ["Adapter", "load_adapter", "merge"]

_EXPERT = re.compile(r"^(?P<layer>.+\.mlp\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj$")
_FUSED = re.compile(r"^(?P<layer>.+\.mlp\.experts)(?:\.base_layer)?$")
# Matrices that an adapter can add to; the key half of kv_b_proj is absorbed, so its addition is merged into it.
_TARGETS = (
    "self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj",
    "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "shared_experts.gate_proj",
    "shared_experts.up_proj", "shared_experts.down_proj",
)  # fmt: skip
# One matrix of an expert: (its number, "gate", "up" or "down").
_Parts = dict[tuple[int, str], LowRank]


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter; belongs to no model until a `WeightView` has it.

    Attributes:
        name: the caller's.
        linear: additions by the path of their Linear, in the model's dtype and on its device.
        absorbed: additions to kv_b_proj by path; they are merged, as the attention reads that matrix absorbed.
        experts: additions by the path of their Experts.
    """

    name: str
    linear: dict[str, LowRank] = field(default_factory=dict)
    absorbed: dict[str, LowRank] = field(default_factory=dict)
    experts: dict[str, ExpertLowRank] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        parts = [*self.linear.values(), *self.absorbed.values(), *self.experts.values()]
        return sum(t.nbytes for part in parts for t in part.tensors)


def load_adapter(path: str | PathLike[str], model: nn.Module, name: str | None = None) -> Adapter:
    """Read a folder as PEFT writes it; the model is only looked at.

    Targets are the projections of attention, of dense and of shared feed-forward layers, single experts
    (`mlp.experts.<e>.gate_proj`) and PEFT's form of fused ones. The scale is alpha / r, or alpha / sqrt(r) with
    use_rslora; rank_pattern and alpha_pattern are obeyed.

    Args:
        path: folder with adapter_config.json and adapter_model.safetensors.
        model: whose shapes, dtype and device the adapter gets.
        name: of the adapter; None takes the folder's.

    Raises:
        CheckpointError: a file is missing or damaged, a setting is not supported, or a tensor is unknown, lacks its
            partner, has another shape or holds what is no number; the message names tensor and file.
    """
    folder = Path(path)
    settings = read_settings(folder)
    like = next(model.parameters())
    read = _Reading(dict(model.named_modules()), settings, folder / WEIGHTS, like)
    for target, pair in read_pairs(folder).items():
        read.take(target, pair)
    return Adapter(folder.name if name is None else name, read.linear, read.absorbed, read.fused())


@torch.no_grad()
def merge(model: nn.Module, adapter: Adapter) -> None:
    """Add an adapter to the model's own weights, in float32 with one rounding each; there is no way back.

    The merged model's bits are not those of the adapter beside the weights: merge on both sides or on neither. Views
    that share the model's weights change with it.

    Raises:
        ContractError: a weight is quantised; nothing was written.
    """
    modules = dict(model.named_modules())
    found = [(path, modules[path]) for path in (*adapter.linear, *adapter.absorbed, *adapter.experts)]
    for path, module in found:
        names = ("gate_up_proj", "down_proj") if isinstance(module, Experts) else ("weight",)
        if any(not isinstance(getattr(module, n, None), Tensor) for n in names):
            raise ContractError(f"merge: {path} is quantised or not in memory, needs float weights")
    for path, module in found:
        if path in adapter.experts:
            e = adapter.experts[path]
            for name, a, b in (("gate_up_proj", e.gate_up_a, e.gate_up_b), ("down_proj", e.down_a, e.down_b)):
                weight = getattr(module, name)
                for i in range(weight.shape[0]):
                    load_weight(weight, widened(weight[i]) + widened(b[i]) @ widened(a[i]), i)
        else:
            part = adapter.linear.get(path) or adapter.absorbed[path]
            load_weight(module.weight, widened(module.weight) + part.delta())


class _Reading:
    """Sorts an adapter's tensors by the module that they add to."""

    def __init__(self, modules: dict[str, nn.Module], settings: AdapterSettings, file: Path, like: Tensor) -> None:
        self._modules, self._settings, self._file, self._like = modules, settings, file, like
        self.linear: dict[str, LowRank] = {}
        self.absorbed: dict[str, LowRank] = {}
        self._single: dict[str, _Parts] = {}
        self._whole: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}

    def take(self, target: str, pair: dict[str, Tensor]) -> None:
        """Check one pair and keep it.

        Raises:
            CheckpointError: see `load_adapter`.
        """
        where = f"adapter: {target} in {self._file}"
        if match := _EXPERT.match(target):
            self._take_expert(where, match, target, pair)
        elif match := _FUSED.match(target):
            self._take_fused(where, match["layer"], pair)
        else:
            module = self._modules.get(target)
            if not isinstance(module, Linear) or not target.endswith(_TARGETS):
                raise CheckpointError(
                    f"{where} is no matrix that an adapter can add to, needs one of {', '.join(_TARGETS)}"
                )
            rank, scale = self._settings.of(target)
            part = self._low_rank(where, pair, tuple(module.weight.shape), rank, scale)
            (self.absorbed if target.endswith("kv_b_proj") else self.linear)[target] = part

    def fused(self) -> dict[str, ExpertLowRank]:
        """Additions to experts, by layer."""
        if both := sorted(self._single.keys() & self._whole.keys()):
            raise CheckpointError(
                f"adapter: {both[0]} in {self._file} has additions to single experts and to fused ones, needs one form"
            )
        found = {layer: self._from_single(layer, parts) for layer, parts in self._single.items()}
        for layer, wholes in self._whole.items():
            experts, two, hidden = self._sizes("", layer)
            shapes = {"gate_up": (two, hidden), "down": (hidden, two // 2)}
            pairs = [wholes.get(n) or self._zeros(experts, shapes[n]) for n in ("gate_up", "down")]
            found[layer] = ExpertLowRank(*pairs[0], *pairs[1])
        return found

    def _take_expert(self, where: str, match: re.Match[str], target: str, pair: dict[str, Tensor]) -> None:
        experts, two, hidden = self._sizes(where, match["layer"])
        if int(match["expert"]) >= experts:
            raise CheckpointError(f"{where} is for expert {match['expert']}, needs one below {experts}")
        shape = (hidden, two // 2) if match["part"] == "down" else (two // 2, hidden)
        part = self._low_rank(where, pair, shape, *self._settings.of(target))
        self._single.setdefault(match["layer"], {})[int(match["expert"]), match["part"]] = part

    def _take_fused(self, where: str, layer: str, pair: dict[str, Tensor]) -> None:
        """PEFT's form for a parameter [E, O, N]: A [E r, N], B [O, r E] with the expert fastest; shapes tell which."""
        experts, two, hidden = self._sizes(where, layer)
        shapes = {"gate_up": (two, hidden), "down": (hidden, two // 2)}
        got = (pair["B"].shape[0], pair["A"].shape[-1])
        name = next((n for n, shape in shapes.items() if shape == got), None)
        if name is None:
            raise CheckpointError(f"{where} is for a matrix {list(got)}, needs {[list(s) for s in shapes.values()]}")
        rank, scale = self._settings.of(f"{layer}.{name}_proj")
        out, inner = shapes[name]
        part = self._low_rank(where, pair, (out, inner), experts * rank, scale)
        a = part.a.view(experts, rank, inner)
        b = part.b.view(out, rank, experts).permute(2, 0, 1).contiguous()
        self._whole.setdefault(layer, {})[name] = a, b

    def _sizes(self, where: str, layer: str) -> tuple[int, int, int]:
        """(E, 2I, N) of a layer's experts."""
        owner = self._modules.get(layer)
        if not isinstance(owner, Experts) or not owner.whole:
            raise CheckpointError(
                f"{where} adds to {layer}, needs a layer with all of its experts in memory; merge the adapter into the "
                "checkpoint instead"
            )
        experts, two, hidden = owner.gate_up_proj.shape
        return experts, two, hidden

    def _low_rank(
        self, where: str, pair: dict[str, Tensor], shape: tuple[int, ...], rank: int, scale: float
    ) -> LowRank:
        for side, want in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
            tensor = pair[side]
            if tuple(tensor.shape) != want or not tensor.is_floating_point():
                got = f"{tensor.dtype} {list(tensor.shape)}"
                raise CheckpointError(f"{where}: lora_{side} is {got}, needs floats {list(want)}")
            if not bool(tensor.isfinite().all()):
                raise CheckpointError(f"{where}: lora_{side} holds infinity or NaN, needs numbers")
        like = self._like
        b = widened(pair["B"].to(torch.float64 if like.dtype == torch.float64 else pair["B"].dtype)) * scale
        return LowRank(pair["A"].to(like.device, like.dtype), b.to(like.device, like.dtype))

    def _zeros(self, experts: int, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        a, b = (
            torch.zeros(experts, *s, dtype=self._like.dtype, device=self._like.device)
            for s in ((1, shape[1]), (shape[0], 1))
        )
        return a, b

    def _from_single(self, layer: str, parts: _Parts) -> ExpertLowRank:
        """Gate and up share one product: their factors lie on its diagonal."""
        experts, two, hidden = self._sizes("", layer)
        inner = two // 2
        ranks = {
            n: max([p.a.shape[0] for (_, m), p in parts.items() if m == n], default=1) for n in ("gate", "up", "down")
        }
        both = ranks["gate"] + ranks["up"]
        gate_up_a, gate_up_b, down_a, down_b = (
            torch.zeros(experts, *shape, dtype=self._like.dtype, device=self._like.device)
            for shape in ((both, hidden), (two, both), (ranks["down"], inner), (hidden, ranks["down"]))
        )
        for (e, name), part in parts.items():
            rank = part.a.shape[0]
            if name == "down":
                down_a[e, :rank], down_b[e, :, :rank] = part.a, part.b
                continue
            first, rows = (0, slice(0, inner)) if name == "gate" else (ranks["gate"], slice(inner, two))
            low = slice(first, first + rank)
            gate_up_a[e, low], gate_up_b[e, rows, low] = part.a, part.b
        return ExpertLowRank(gate_up_a, gate_up_b, down_a, down_b)
