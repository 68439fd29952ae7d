"""Modules whose weights are quantised: buffers under a parameter's name, read as a Weight where the float ones are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from glm5sdk.core.errors import ContractError
from glm5sdk.nn.layers import Linear
from glm5sdk.nn.moe import Experts
from glm5sdk.ops._weights import storage
from glm5sdk.registry.weight import Weight

__all__ = ["QuantisedExperts", "QuantisedLinear", "empty_weight", "named_weights", "quantised_like", "weight_kinds"]


class _Holder(nn.Module):
    """Keeps weights as buffers `<name>_values` and `<name>_scale`.

    Buffers travel with `.to(device)` and state_dict; a cast of the model leaves their dtypes alone, because integers,
    e4m3 and their float32 scales are the format.
    """

    _held: dict[str, tuple[str, tuple[int, ...]]]

    def _hold(self, name: str, weight: Weight) -> None:
        if weight.layout != "plain" or [(tuple(t.shape), t.dtype) for t in weight.tensors] != [
            *storage(weight.kind, weight.shape)
        ]:
            raise ContractError(
                f"quantised module: {name} is {weight.tag} with {[(tuple(t.shape), t.dtype) for t in weight.tensors]}, "
                f"needs a quantised weight of {weight.shape} in plain layout"
            )
        self.__dict__.setdefault("_held", {})[name] = (weight.kind, weight.shape)
        for part, tensor in zip(("values", "scale"), weight.tensors, strict=True):
            self.register_buffer(f"{name}_{part}", tensor)

    def held(self, name: str) -> Weight:
        """The weight called `name`, of the buffers as they are now."""
        kind, shape = self._held[name]
        return Weight(kind, "plain", shape, (getattr(self, f"{name}_values"), getattr(self, f"{name}_scale")))

    def held_names(self) -> tuple[str, ...]:
        """Names of the weights."""
        return tuple(self._held)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Holder:
        def keep_dtype(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        super()._apply(keep_dtype, recurse)
        return self


class QuantisedLinear(_Holder, Linear):
    """`Linear` with a quantised weight; straight-through for the gradient of its input, none for the weight."""

    def __init__(self, weight: Weight) -> None:
        nn.Module.__init__(self)
        self._hold("weight", weight)

    @property
    def weight(self) -> Weight:  # type: ignore[override]
        return self.held("weight")


class QuantisedExperts(_Holder, Experts):
    """`Experts` with quantised weights."""

    def __init__(self, gate_up: Weight, down: Weight, limit: float | None) -> None:
        nn.Module.__init__(self)
        self._hold("gate_up_proj", gate_up)
        self._hold("down_proj", down)
        self.limit = limit

    @property
    def gate_up_proj(self) -> Weight:  # type: ignore[override]
        return self.held("gate_up_proj")

    @property
    def down_proj(self) -> Weight:  # type: ignore[override]
        return self.held("down_proj")


def empty_weight(kind: str, shape: tuple[int, ...], device: torch.device | str) -> Weight:
    """A quantised weight of that kind and shape whose numbers are yet to be written."""
    tensors = tuple(torch.empty(s, dtype=dtype, device=device) for s, dtype in storage(kind, shape))
    return Weight(kind, "plain", shape, tensors)


def quantised_like(module: nn.Module, kinds: dict[str, str]) -> nn.Module:
    """An unfilled quantised module to take the place of a float one, on its device.

    Args:
        module: Linear or Experts.
        kinds: kind of each of its weights, by the weight's own name.

    Raises:
        ContractError: another module, or not every weight of it has a kind.
    """
    names = ("weight",) if isinstance(module, Linear) else ("gate_up_proj", "down_proj")
    if not isinstance(module, (Linear, Experts)) or isinstance(module, _Holder) or set(kinds) != set(names):
        raise ContractError(
            f"quantised module: {type(module).__name__} got kinds for {sorted(kinds)}, needs a Linear or Experts with "
            "a kind for each weight"
        )
    floats = [getattr(module, name) for name in names]
    weights = [empty_weight(kinds[n], tuple(w.shape), w.device) for n, w in zip(names, floats, strict=True)]
    return QuantisedLinear(*weights) if isinstance(module, Linear) else QuantisedExperts(*weights, module.limit)


def named_weights(model: nn.Module) -> Iterator[tuple[str, Weight]]:
    """Every quantised weight under the name that its parameter has in a float model."""
    for prefix, module in model.named_modules():
        if isinstance(module, _Holder):
            for name in module.held_names():
                yield f"{prefix}.{name}" if prefix else name, module.held(name)


def weight_kinds(model: nn.Module) -> frozenset[str]:
    """Kinds of the quantised weights, empty for a float model."""
    return frozenset(weight.kind for _, weight in named_weights(model))
