"""Patches of some experts: checked against their layer, and joined with earlier ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from glm5sdk.core.errors import ContractError
from glm5sdk.nn.moe import ExpertPatch, Experts
from glm5sdk.registry.weight import Weight, WeightLike

__all__ = ["check_patch", "experts_at", "join_patches"]


def experts_at(model: nn.Module, path: str) -> Experts:
    """The experts at `path`.

    Raises:
        ContractError: there are none.
    """
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = model
    if not isinstance(module, Experts):
        raise ContractError(f"weight view: a patch is for {path}, needs the path of a layer's experts")
    return module


def check_patch(path: str, patch: ExpertPatch, module: Experts) -> None:
    """Compare a patch with the layer that it is for.

    Raises:
        ContractError: ids are not ascending ones of the layer, or the weights are no such experts.
    """
    gate_up, down = module.weights_like()
    count = module.count
    if list(patch.ids) != sorted(set(patch.ids)) or not patch.ids or not 0 <= patch.ids[0] <= patch.ids[-1] < count:
        raise ContractError(
            f"weight view: experts in the patch of {path} are {patch.ids}, needs ascending ids below {count}"
        )
    for name, got, want in (("gate_up_proj", patch.gate_up, gate_up), ("down_proj", patch.down, down)):
        said, needs = _description(got, None), _description(want, len(patch.ids))
        if said != needs:
            raise ContractError(f"weight view: the patch of {path}.{name} is {said}, needs {needs}")


def _description(weight: WeightLike, lead: int | None) -> tuple[Any, ...]:
    """Kind, dtypes, device and shapes, with another leading size if one is given."""
    tensors = weight.tensors if isinstance(weight, Weight) else (weight,)
    kind = weight.kind if isinstance(weight, Weight) else "plain"
    shapes = [((t.shape[0] if lead is None else lead), *t.shape[1:]) for t in tensors]
    return kind, [(shape, t.dtype, t.device) for shape, t in zip(shapes, tensors, strict=True)]


def join_patches(old: ExpertPatch, new: ExpertPatch) -> ExpertPatch:
    """Both patches in one; experts that both have are the new one's."""
    kept = [i for i, e in enumerate(old.ids) if e not in new.ids]
    if not kept:
        return new
    ids = [old.ids[i] for i in kept] + list(new.ids)
    order = sorted(range(len(ids)), key=ids.__getitem__)

    def join(a: WeightLike, b: WeightLike) -> WeightLike:
        if isinstance(a, Weight) and isinstance(b, Weight):
            tensors = tuple(torch.cat([x[kept], y])[order] for x, y in zip(a.tensors, b.tensors, strict=True))
            return Weight(a.kind, a.layout, (len(ids), *a.shape[1:]), tensors)
        assert isinstance(a, Tensor)  # their kinds were compared with the module's
        assert isinstance(b, Tensor)
        return torch.cat([a[kept], b])[order]

    return ExpertPatch(tuple(ids[i] for i in order), join(old.gate_up, new.gate_up), join(old.down, new.down))
