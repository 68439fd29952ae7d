"""Where a model's experts live: in slots over files, or spread over processes; the rest of the model stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from os import PathLike
from pathlib import Path

import torch
from torch import nn

from glm5sdk.core.errors import CapacityError, CheckpointError, ContractError
from glm5sdk.models.glm5.checkpoint import Checkpoint, open_checkpoint
from glm5sdk.models.glm5.expert_files import CheckpointExperts, OpenFiles
from glm5sdk.models.glm5.model import Glm5ForCausalLM
from glm5sdk.models.glm5.tensors import TensorSpec
from glm5sdk.nn.expert_parallel import ParallelExperts
from glm5sdk.nn.moe import Experts, MixtureOfExperts
from glm5sdk.nn.offload import OffloadedExperts, OffloadStats, Reader
from glm5sdk.parallel import ProcessGroup
from glm5sdk.registry.weight import Weight

__all__ = ["is_own_expert", "offload_experts", "offload_stats", "put_in_slots", "spread_experts"]


def offload_experts(
    model: Glm5ForCausalLM,
    checkpoint: str | PathLike[str],
    slots: int | None = None,
    budget_bytes: int | None = None,
    lookahead: bool = False,
    verify: bool = True,
) -> Glm5ForCausalLM:
    """Exchange a model's routed experts for slots that are filled from files; results stay the same, bit for bit.

    A folder without weights gets the model's own, once. Otherwise the experts are those of the checkpoint, rounded to
    the model's dtype as loading does. To never have all experts in memory, load with
    `Glm5ForCausalLM.from_pretrained(path, expert_slots=...)`. Inference only.

    Args:
        model: changed in place.
        checkpoint: folder or .safetensors file that holds every expert, and may hold the rest.
        slots: experts a layer keeps in memory, from 1.
        budget_bytes: for the slots of all layers together, instead of `slots`.
        lookahead: guess the next layer's experts with its router and begin to read them.
        verify: compare checksums of what is read again.

    Raises:
        CheckpointError: experts are missing, misshapen or of another kind than the model's.
        CapacityError: the budget is less than one expert a layer. ContractError: not exactly one of the two is given.
    """
    path = Path(checkpoint)
    if not path.is_file() and not any(path.glob("*.safetensors")):
        model.save_pretrained(path)
    opened = open_checkpoint(path, model.config, partial=True)
    kinds: dict[str, str] = {}
    for name, module in _mixtures(model).items():
        if isinstance(module.experts, ParallelExperts):
            raise ContractError(f"offload: {name}.experts is spread over processes, needs all experts in this one")
        for part, weight in zip(("gate_up_proj", "down_proj"), module.experts.weights_like(), strict=True):
            if isinstance(weight, Weight):
                kinds[f"{name}.experts.{part}"] = weight.kind
    for spec in opened.specs(lambda s: s.index is not None and s.parameter in kinds):
        if opened.kinds[spec.name] != kinds[spec.parameter]:
            raise CheckpointError(
                f"checkpoint: {spec.name} in {opened.path} is {opened.kinds[spec.name]}, needs "
                f"{kinds[spec.parameter]}, which the model keeps quantised"
            )
    return put_in_slots(model, opened, kinds, slots, budget_bytes, model.dtype, model.device, lookahead, verify)


def put_in_slots(
    model: Glm5ForCausalLM,
    checkpoint: Checkpoint,
    kinds: Mapping[str, str],
    slots: int | None,
    budget_bytes: int | None,
    dtype: torch.dtype,
    device: torch.device | str,
    lookahead: bool = False,
    verify: bool = True,
) -> Glm5ForCausalLM:
    """As `offload_experts`, over an opened checkpoint; `kinds` names the fused weights that stay quantised."""
    if (slots is None) == (budget_bytes is None):
        raise ContractError(f"offload: slots is {slots} and budget_bytes {budget_bytes}, needs exactly one of them")
    mixtures = _mixtures(model)
    files, reader = OpenFiles(verify), Reader()
    sources = {}
    for name in mixtures:
        own = {n: kinds[f"{name}.experts.{n}"] for n in ("gate_up_proj", "down_proj") if f"{name}.experts.{n}" in kinds}
        sources[name] = CheckpointExperts(checkpoint, f"{name}.experts", own, files)
    if slots is None and sources:
        each = sum(_slot_bytes(source, dtype) for source in sources.values())
        slots = (budget_bytes or 0) // each
        if slots < 1:
            raise CapacityError(
                f"offload: budget is {budget_bytes} bytes, needs at least {each} for one expert in each of "
                f"{len(sources)} layers"
            )
    before: OffloadedExperts | None = None
    for name, mixture in mixtures.items():
        experts = OffloadedExperts(
            sources[name], 1 if slots is None else slots, mixture.experts.limit, dtype, device, reader
        )
        mixture.experts = experts
        if lookahead and before is not None:
            before.__dict__["following"] = mixture.gate, experts
        before = experts
    return model


def spread_experts(model: nn.Module, group: ProcessGroup, capacity: int | None = None) -> None:
    """Exchange each layer's experts for this process's share of them; loaded weights are kept, those of others freed.

    Router, its bias and the shared expert stay on every process.

    Args:
        model: float weights; also one on the meta device, whose weights are yet to come.
        group: over which experts are spread.
        capacity: see `ParallelExperts`.

    Raises:
        ContractError: the group's size does not divide the experts, or they are quantised or offloaded.
    """
    for name, mixture in _mixtures(model).items():
        old = mixture.experts
        if type(old) is not Experts:
            raise ContractError(f"expert parallel: {name}.experts is {type(old).__name__}, needs plain float Experts")
        experts, two, hidden = old.gate_up_proj.shape
        with torch.device("meta"):
            new = ParallelExperts(experts, two // 2, hidden, old.limit, group, capacity)
        own = slice(new.first, new.first + new.count)
        for weight in ("gate_up_proj", "down_proj"):
            whole = getattr(old, weight)
            share = whole.detach()[own]
            setattr(new, weight, nn.Parameter(share if whole.is_meta else share.clone(), requires_grad=False))
        mixture.experts = new


def is_own_expert(model: nn.Module, spec: TensorSpec) -> bool:
    """Whether a checkpoint's tensor has a place in this process's memory."""
    if spec.index is None:
        return True
    experts = model.get_submodule(spec.parameter.rpartition(".")[0])
    assert isinstance(experts, Experts)
    assert isinstance(spec.index[0], int)
    return not isinstance(experts, OffloadedExperts) and 0 <= spec.index[0] - experts.first < experts.count


def offload_stats(model: nn.Module) -> OffloadStats:
    """Totals over all layers; zeros for a model whose experts are in memory."""
    total = OffloadStats()
    for module in model.modules():
        if isinstance(module, OffloadedExperts):
            for key, value in asdict(module.stats).items():
                setattr(total, key, getattr(total, key) + value)
    return total


def _mixtures(model: nn.Module) -> dict[str, MixtureOfExperts]:
    return {name: m for name, m in model.named_modules() if isinstance(m, MixtureOfExperts)}


def _slot_bytes(source: CheckpointExperts, dtype: torch.dtype) -> int:
    weights = source.empty(1, dtype, torch.device("meta"))
    return sum(t.nbytes for w in weights for t in (w.tensors if isinstance(w, Weight) else (w,)))
