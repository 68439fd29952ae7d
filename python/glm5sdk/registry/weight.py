"""Weights with kinds and layouts, and the one road by which a weight's values are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glm5sdk.core.errors import ContractError

__all__ = ["Layout", "Weight", "WeightLike", "generation", "load_weight"]


@dataclass(frozen=True, eq=False)
class Weight:
    """A weight as an implementation wants it.

    Attributes:
        kind: what the numbers mean: `plain`, `w8a8`, `w4a8`, `fp8`.
        layout: where they lie: `plain`, or a layout's name as its backend spells it.
        shape: logical shape, whatever the layout: [O, N] or [E, O, N].
        tensors: the data; for quantised kinds (values, scales), in the order the kind defines.
    """

    kind: str
    layout: str
    shape: tuple[int, ...]
    tensors: tuple[Tensor, ...]

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def requires_grad(self) -> bool:
        return any(t.requires_grad for t in self.tensors)

    @property
    def tag(self) -> str:
        """`kind/layout`, the form in which torch.library carries both."""
        return f"{self.kind}/{self.layout}"

    def map(self, f: Callable[[Tensor], Tensor]) -> Weight:
        """The same weight with `f` applied to each of its tensors."""
        return Weight(self.kind, self.layout, self.shape, tuple(f(t) for t in self.tensors))


WeightLike = Tensor | Weight


@dataclass(frozen=True)
class Layout:
    """A way to store a weight, owned by an implementation.

    Attributes:
        name: unique, `<backend>.<name>`.
        kind: the kind of weight it stores.
        pack: plain-layout weight -> tensors.
        unpack: exact inverse: tensors, shape -> plain-layout tensors.
    """

    name: str
    kind: str
    pack: Callable[[Weight], tuple[Tensor, ...]]
    unpack: Callable[[Weight], tuple[Tensor, ...]]


def as_weight(w: WeightLike) -> Weight:
    """A plain tensor seen as a `plain/plain` weight; a Weight as it is."""
    return w if isinstance(w, Weight) else Weight("plain", "plain", tuple(w.shape), (w,))


def from_parts(tensors: list[Tensor], tag: str, shape: tuple[int, ...]) -> WeightLike:
    """Inverse of the flattening for torch.library: plain/plain comes back as the tensor itself."""
    if tag == "plain/plain":
        return tensors[0]
    kind, _, layout = tag.partition("/")
    return Weight(kind, layout, tuple(shape), tuple(tensors))


def generation(parameter: Tensor) -> int:
    """How often `load_weight` has written this tensor; prepared copies made earlier are stale."""
    return int(getattr(parameter, "_glm5_generation", 0))


def load_weight(parameter: Tensor, value: Tensor, index: Any = None) -> None:
    """Write `value` into `parameter` (or into `parameter[index]`), the only way weights change outside an optimiser.

    torch's own version counter does not move on `.data` writes, so prepared copies could not know; here they do.

    Args:
        parameter: any shape, any float dtype.
        value: the shape of what it replaces; converted to the parameter's dtype with one rounding.
        index: optional index of the slice to write.

    Raises:
        ContractError: the shapes differ; nothing was written.
    """
    with torch.no_grad():
        target = parameter.detach() if index is None else parameter.detach()[index]
        if target.shape != value.shape:
            raise ContractError(f"load_weight: value is {tuple(value.shape)}, needs {tuple(target.shape)}")
        target.copy_(value)
    parameter._glm5_generation = generation(parameter) + 1  # type: ignore[attr-defined]
