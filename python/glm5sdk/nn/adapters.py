"""LoRA adapters: a PEFT folder becomes additions to a model's matrices, applied beside them or merged into them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.nn.layers import Linear
from glm5sdk.nn.low_rank import ExpertLowRank, LowRank, widened
from glm5sdk.nn.moe import Experts
from glm5sdk.registry.weight import load_weight

__all__ = ["Adapter", "load_adapter", "merge"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"^(?:base_model\.model\.)?(?P<path>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight$")
_EXPERT = re.compile(r"^(?P<layer>.+\.mlp\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj$")
# Matrices that an adapter can add to; the key half of kv_b_proj is absorbed, so its addition is merged into it.
_TARGETS = (
    "self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj",
    "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "shared_experts.gate_proj",
    "shared_experts.up_proj", "shared_experts.down_proj",
)  # fmt: skip
# Settings that change what the tensors mean, with the only value that is read here.
_PLAIN = {
    "use_dora": False, "use_qalora": False, "lora_bias": False, "fan_in_fan_out": False, "bias": "none",
    "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": [], "target_parameters": [],
    "trainable_token_indices": [], "layer_replication": [],
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter; belongs to no model until a `WeightView` has it.

    Attributes:
        name: the caller's.
        linear: additions by the path of their Linear, in the model's dtype and on its device.
        absorbed: additions to kv_b_proj by path; they are merged, as the attention reads that matrix absorbed.
        experts: additions by the path of their Experts.
        rank, scale: r, and what B was multiplied with.
    """

    name: str
    linear: dict[str, LowRank] = field(default_factory=dict)
    absorbed: dict[str, LowRank] = field(default_factory=dict)
    experts: dict[str, ExpertLowRank] = field(default_factory=dict)
    rank: int = 0
    scale: float = 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        parts = [*self.linear.values(), *self.absorbed.values(), *self.experts.values()]
        return sum(t.nbytes for part in parts for t in part.tensors)


def load_adapter(path: str | PathLike[str], model: nn.Module, name: str | None = None) -> Adapter:
    """Read a folder as PEFT writes it; the model is only looked at.

    Targets are the projections of attention, dense and shared feed-forward layers and single experts
    (`mlp.experts.<e>.gate_proj`). The scale is alpha / r, or alpha / sqrt(r) with use_rslora.

    Args:
        path: folder with adapter_config.json and adapter_model.safetensors.
        model: whose shapes, dtype and device the adapter gets.
        name: of the adapter; None takes the folder's.

    Raises:
        CheckpointError: a file is missing or damaged, a setting is not supported, or a tensor is unknown, lacks its
            partner, has another shape or holds what is no number; the message names tensor and file.
    """
    folder = Path(path)
    rank, scale = _settings(folder / CONFIG)
    file = folder / WEIGHTS
    pairs = _pairs(file)
    linear: dict[str, LowRank] = {}
    absorbed: dict[str, LowRank] = {}
    experts: dict[str, dict[tuple[int, str], LowRank]] = {}
    modules = dict(model.named_modules())
    like = next(model.parameters())
    for target, pair in pairs.items():
        where = f"adapter: {target} in {file}"
        expert = _EXPERT.match(target)
        if expert is not None:
            owner = modules.get(expert["layer"])
            if not isinstance(owner, Experts) or not hasattr(owner, "gate_up_proj") or owner.first:
                raise CheckpointError(f"{where} adds to {expert['layer']}, which has no experts of its own in memory")
            count, two, hidden = owner.gate_up_proj.shape
            if int(expert["expert"]) >= count:
                raise CheckpointError(f"{where} is for expert {expert['expert']}, needs one below {count}")
            shape = (hidden, two // 2) if expert["part"] == "down" else (two // 2, hidden)
            part = _checked(where, pair, shape, rank, scale, like)
            experts.setdefault(expert["layer"], {})[int(expert["expert"]), expert["part"]] = part
            continue
        module = modules.get(target)
        if not isinstance(module, Linear) or not target.endswith(_TARGETS):
            raise CheckpointError(
                f"{where} is no matrix that an adapter can add to, needs one of {', '.join(_TARGETS)}"
            )
        part = _checked(where, pair, tuple(module.weight.shape), rank, scale, like)
        (absorbed if target.endswith("kv_b_proj") else linear)[target] = part
    fused = {layer: _fuse(parts, modules[layer], rank, like) for layer, parts in experts.items()}
    return Adapter(folder.name if name is None else name, linear, absorbed, fused, rank, scale)


@torch.no_grad()
def merge(model: nn.Module, adapter: Adapter) -> None:
    """Add an adapter to the model's own weights, in float32 with one rounding each; there is no way back.

    The merged model's bits are not those of the adapter beside the weights: merge on both sides or on neither.

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
            for weight, a, b in (
                (module.gate_up_proj, e.gate_up_a, e.gate_up_b),
                (module.down_proj, e.down_a, e.down_b),
            ):
                for i in range(weight.shape[0]):
                    load_weight(weight, widened(weight[i]) + widened(b[i]) @ widened(a[i]), i)
        else:
            part = adapter.linear.get(path) or adapter.absorbed[path]
            load_weight(module.weight, widened(module.weight) + part.delta())


def _settings(file: Path) -> tuple[int, float]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"adapter: {file} cannot be read ({error}), needs PEFT's JSON") from error
    if not isinstance(config, dict) or str(config.get("peft_type", "")).upper() != "LORA":
        got = config.get("peft_type") if isinstance(config, dict) else config
        raise CheckpointError(f"adapter: peft_type in {file} is {got!r}, needs 'LORA'")
    for key, plain in _PLAIN.items():
        if (value := config.get(key)) and value != plain:
            raise CheckpointError(f"adapter: {key} in {file} is {value!r}, needs {plain!r}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise CheckpointError(f"adapter: r in {file} is {rank!r}, needs a whole number from 1")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise CheckpointError(f"adapter: lora_alpha in {file} is {alpha!r}, needs a number")
    return rank, alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _pairs(file: Path) -> dict[str, dict[str, Tensor]]:
    """Side ("A", "B") -> tensor, by the path of the matrix that they add to."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Any] = load_file(str(file))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"adapter: {file} cannot be read ({error}), needs a safetensors file") from error
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.match(key)
        if match is None:
            raise CheckpointError(f"adapter: {key} in {file} is unknown, needs `<matrix>.lora_A.weight` or lora_B")
        sides = pairs.setdefault(match["path"], {})
        if match["side"] in sides:
            raise CheckpointError(f"adapter: {key} in {file} is there under two names, needs one")
        sides[match["side"]] = tensor
    if not pairs:
        raise CheckpointError(f"adapter: {file} holds no tensors, needs pairs of lora_A and lora_B")
    for path, sides in pairs.items():
        if len(sides) != 2:
            raise CheckpointError(
                f"adapter: {path} in {file} has only lora_{next(iter(sides))}, needs lora_A and lora_B"
            )
    return pairs


def _checked(
    where: str, pair: dict[str, Tensor], shape: tuple[int, ...], rank: int, scale: float, like: Tensor
) -> LowRank:
    for side, want in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
        tensor = pair[side]
        if tuple(tensor.shape) != want or not tensor.is_floating_point():
            raise CheckpointError(
                f"{where}: lora_{side} is {tensor.dtype} {list(tensor.shape)}, needs floats {list(want)}"
            )
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{where}: lora_{side} holds infinity or NaN, needs numbers")
    b = widened(pair["B"].to(torch.float64 if like.dtype == torch.float64 else pair["B"].dtype)) * scale
    return LowRank(pair["A"].to(like.device, like.dtype), b.to(like.device, like.dtype))


def _fuse(parts: dict[tuple[int, str], LowRank], owner: nn.Module, rank: int, like: Tensor) -> ExpertLowRank:
    assert isinstance(owner, Experts)
    experts, two, hidden = owner.gate_up_proj.shape
    inner = two // 2
    gate_up_a, gate_up_b, down_a, down_b = (
        torch.zeros(experts, *shape, dtype=like.dtype, device=like.device)
        for shape in ((2 * rank, hidden), (two, 2 * rank), (rank, inner), (hidden, rank))
    )
    for (e, name), part in parts.items():
        if name == "down":
            down_a[e], down_b[e] = part.a, part.b
            continue
        low, high = (slice(0, rank), slice(0, inner)) if name == "gate" else (slice(rank, None), slice(inner, None))
        gate_up_a[e, low], gate_up_b[e, high, low] = part.a, part.b
    return ExpertLowRank(gate_up_a, gate_up_b, down_a, down_b)
