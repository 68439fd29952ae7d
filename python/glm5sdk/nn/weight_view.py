"""WeightView: all weights of a model at one version, made the model's own for the time of one forward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from glm5sdk.core.errors import ContractError
from glm5sdk.nn.adapters import Adapter
from glm5sdk.nn.expert_patches import check_patch, experts_at, join_patches
from glm5sdk.nn.layers import Linear
from glm5sdk.nn.low_rank import ExpertLowRank, LowRank, widened
from glm5sdk.nn.mla import LatentAttention
from glm5sdk.nn.moe import ExpertPatch, Experts
from glm5sdk.nn.offload import ExpertSource, OffloadedExperts
from glm5sdk.nn.quantised import named_weights
from glm5sdk.registry.weight import Weight, WeightLike

__all__ = ["WeightView"]


@dataclass
class _Absorbed:
    """What an attention layer derived from one kv_b_proj; shared by the views that share that matrix."""

    value: Any = None


class WeightView:
    """A complete table of pointers to weights; views share what they have in common, and nothing is copied.

    The first view of a model is `WeightView.of(model, version)`; others are derived from it. A view is immutable.
    Its own weights are freed when the last reference to it and to those derived from it is gone.

    Attributes:
        version: name of these weights, reported with every token that they made.
        adapter: the adapter beside the weights, or None.
        patches: other weights of some experts, by the path of their Experts.
        sources: where experts that are not in memory come from, by the path of their OffloadedExperts.
    """

    version: str
    adapter: Adapter | None
    patches: Mapping[str, ExpertPatch]
    sources: Mapping[str, ExpertSource]

    def __init__(
        self,
        version: str,
        model: nn.Module,
        table: dict[str, Tensor],
        patches: Mapping[str, ExpertPatch],
        sources: Mapping[str, ExpertSource],
        adapter: Adapter | None,
        absorbed: dict[str, _Absorbed],
    ) -> None:
        """Use `of`, `replaced` or `with_adapter`."""
        self.version, self.patches, self.sources, self.adapter = version, patches, sources, adapter
        self._table, self._absorbed = table, absorbed
        self._model = weakref.ref(model)

    @classmethod
    def of(cls, model: nn.Module, version: str) -> WeightView:
        """The weights that the model has now."""
        if _is_active(model):
            raise ContractError("weight view: the model runs under a view, needs to be outside of it to make the first")
        for memory in ("_view_places", "_view_adaptable"):  # modules may have been exchanged since
            model.__dict__.pop(memory, None)
        table = {name: holder[key] for name, (holder, key) in _places(model).items()}
        kept = {path: _Absorbed(m._absorbed) for path, m in model.named_modules() if isinstance(m, LatentAttention)}
        sources = {path: m.source for path, m in model.named_modules() if isinstance(m, OffloadedExperts)}
        return cls(version, model, table, {}, sources, None, kept)

    def replaced(
        self,
        version: str,
        overrides: Mapping[str, WeightLike] | None = None,
        patches: Mapping[str, ExpertPatch] | None = None,
        sources: Mapping[str, ExpertSource] | None = None,
    ) -> WeightView:
        """A view with some weights replaced; the adapter, if any, stays.

        Args:
            version: of the new view.
            overrides: parameter or buffer name -> tensor, or quantised weight where the model has one. Kept, not
                copied; tied names change together.
            patches: path of an `Experts` -> weights of some of its experts; patches of its other experts stay.
            sources: path of an `OffloadedExperts` -> where all of its experts come from; earlier patches there go.

        Raises:
            ContractError: a name is unknown, or a shape, dtype, kind or device is another one.
        """
        model = self._owner()
        table, absorbed = dict(self._table), dict(self._absorbed)
        held = dict(named_weights(model))
        for name, value in (overrides or {}).items():
            for part, tensor in _spelled_out(name, value, held):
                _put(table, part, tensor)
        for path in absorbed:
            if table[f"{path}.kv_b_proj.weight"] is not self._table[f"{path}.kv_b_proj.weight"]:
                if self.adapter is not None and f"{path}.kv_b_proj" in self.adapter.absorbed:
                    raise ContractError(
                        f"weight view: adapter {self.adapter.name!r} is merged into {path}.kv_b_proj, which is to be "
                        "replaced, needs the view without the adapter; add it afterwards"
                    )
                absorbed[path] = _Absorbed()
        together = dict(self.patches)
        for path in sources or {}:
            if path not in self.sources:
                raise ContractError(
                    f"weight view: a source is for {path}, needs the path of experts that are offloaded"
                )
        replaced = {name.rpartition(".")[0] for name in overrides or {}} | set(sources or {})
        for path in replaced & set(together):  # whole new experts take the place of earlier patches
            del together[path]
        for path, patch in (patches or {}).items():
            module = experts_at(model, path)
            check_patch(path, patch, module)
            together[path] = join_patches(together[path], patch) if path in together else patch
        _check_apart(together, self.adapter)
        return WeightView(version, model, table, together, {**self.sources, **(sources or {})}, self.adapter, absorbed)

    def with_adapter(self, version: str, adapter: Adapter | None) -> WeightView:
        """The same weights with an adapter beside them, in the place of an earlier one; None for none.

        Raises:
            ContractError: the view has an adapter that changed kv_b_proj (start from the view without it), or the
                adapter and a patch concern the experts of one layer.
        """
        model = self._owner()
        if self.adapter is not None and self.adapter.absorbed:
            raise ContractError(
                f"weight view: adapter {self.adapter.name!r} is merged into kv_b_proj, needs the view without it"
            )
        _check_apart(self.patches, adapter)
        table, absorbed = dict(self._table), dict(self._absorbed)
        for path, part in (adapter.absorbed if adapter is not None else {}).items():
            name = f"{path}.weight"
            base = table[name].detach()
            _put(table, name, (widened(base) + part.delta()).to(base.dtype))
            absorbed[path.removesuffix(".kv_b_proj")] = _Absorbed()
        return WeightView(version, model, table, dict(self.patches), dict(self.sources), adapter, absorbed)

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[None]:
        """Run the model with these weights inside the `with`; whatever happens there, it has its own again afterwards.

        Costs one comparison of pointers a weight. One thread at a time; not to be nested.

        Raises:
            ContractError: the view is of another model, or a view is active already.
        """
        if model is not self._model() or _is_active(model):
            what = "is active already" if _is_active(model) else "was made for another model"
            raise ContractError(f"weight view: version {self.version!r} cannot be activated: one {what}")
        undo: list[tuple[dict[str, Any], str, Any]] = []
        model.__dict__["_view_active"] = True
        try:
            derived = self._switch(model, undo)
            try:
                yield
            finally:
                for module, kept in derived:
                    kept.value = module._absorbed
        finally:
            for holder, key, before in reversed(undo):
                holder[key] = before
            del model.__dict__["_view_active"]

    def install(self, model: nn.Module) -> None:
        """Make these weights the model's own, for good; what no view holds any more is freed.

        Raises:
            ContractError: as `active`.
        """
        if model is not self._model() or _is_active(model):
            raise ContractError(f"weight view: version {self.version!r} cannot be installed: another model, or in use")
        self._switch(model, [])

    def weight(self, name: str) -> WeightLike | None:
        """The weight of that name in this view, without patches and adapter; None when the model has none in memory."""
        if name in self._table:
            return self._table[name]
        held = dict(named_weights(self._owner())).get(name)
        if held is None:
            return None
        return Weight(held.kind, held.layout, held.shape, (self._table[f"{name}_values"], self._table[f"{name}_scale"]))

    def nbytes_beside(self, other: WeightView) -> int:
        """Bytes of weights that this view holds and `other` does not."""
        seen = {id(t) for t in other._tensors()}
        return sum(t.nbytes for t in {id(t): t for t in self._tensors()}.values() if id(t) not in seen)

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._table.values()
        for patch in self.patches.values():
            for weight in (patch.gate_up, patch.down):
                yield from (weight.tensors if isinstance(weight, Weight) else (weight,))
        if self.adapter is not None:
            a = self.adapter
            yield from (t for part in (*a.linear.values(), *a.experts.values()) for t in part.tensors)

    def _switch(
        self, model: nn.Module, undo: list[tuple[dict[str, Any], str, Any]]
    ) -> list[tuple[LatentAttention, _Absorbed]]:
        """Point the model here, noting in `undo` what was there.

        Returns:
            The attention layers whose kv_b_proj became another, each with where what is derived from it is kept.
        """

        def point(holder: dict[str, Any], key: str, value: Any, missing: Any = None) -> None:
            before = holder.get(key, missing)
            if before is not value:
                undo.append((holder, key, before))
                holder[key] = value

        places = _places(model)
        derived: list[tuple[LatentAttention, _Absorbed]] = []
        for path, kept in self._absorbed.items():
            name = f"{path}.kv_b_proj.weight"
            holder, key = places[name]
            if holder[key] is not self._table[name]:
                module = model.get_submodule(path)
                assert isinstance(module, LatentAttention)
                derived.append((module, kept))
        for name, (holder, key) in places.items():
            point(holder, key, self._table[name])
        linear: Mapping[str, LowRank] = self.adapter.linear if self.adapter else {}
        experts: Mapping[str, ExpertLowRank] = self.adapter.experts if self.adapter else {}
        for path, module in _adaptable(model):
            if isinstance(module, Experts):
                point(module.__dict__, "adapter", experts.get(path))
                point(module.__dict__, "patch", self.patches.get(path))
                if path in self.sources:
                    point(module.__dict__, "source", self.sources[path])
            else:
                point(module.__dict__, "adapter", linear.get(path))
        for module, kept in derived:
            point(module.__dict__, "_absorbed", kept.value)
        return derived

    def _owner(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise ContractError(f"weight view: the model of version {self.version!r} is gone, needs it alive")
        return model


def _is_active(model: nn.Module) -> bool:
    return "_view_active" in model.__dict__


def _places(model: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Where the model keeps each parameter and buffer, tied ones under every name; found once."""
    found = model.__dict__.get("_view_places")
    if found is None:
        found = model.__dict__["_view_places"] = {}
        for path, module in model.named_modules():
            for holder in (module._parameters, module._buffers):
                for key, value in holder.items():
                    if value is not None:
                        found[f"{path}.{key}" if path else key] = (holder, key)
    return found


def _adaptable(model: nn.Module) -> list[tuple[str, nn.Module]]:
    found = model.__dict__.get("_view_adaptable")
    if found is None:
        found = [(path, m) for path, m in model.named_modules() if isinstance(m, (Linear, Experts))]
        model.__dict__["_view_adaptable"] = found
    return found


def _spelled_out(name: str, value: WeightLike, held: Mapping[str, Weight]) -> Iterator[tuple[str, Tensor]]:
    """The tensors behind a weight's name."""
    if isinstance(value, Tensor):
        yield name, value
        return
    if name not in held or (held[name].tag, held[name].shape) != (value.tag, tuple(value.shape)):
        want = f"{held[name].tag} {held[name].shape}" if name in held else "a plain tensor"
        raise ContractError(f"weight view: {name} is {value.tag} {tuple(value.shape)}, needs {want}")
    yield from zip((f"{name}_values", f"{name}_scale"), value.tensors, strict=True)


def _put(table: dict[str, Tensor], name: str, value: Tensor) -> None:
    if name not in table:
        raise ContractError(f"weight view: {name} is no parameter or buffer of the model, needs one that it has")
    old = table[name]
    if (value.shape, value.dtype, value.device) != (old.shape, old.dtype, old.device):
        raise ContractError(
            f"weight view: {name} is {value.dtype} {list(value.shape)} on {value.device}, needs {old.dtype} "
            f"{list(old.shape)} on {old.device}"
        )
    if isinstance(old, nn.Parameter) and not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=False)
    for tied in [other for other, tensor in table.items() if tensor is old]:
        table[tied] = value


def _check_apart(patches: Mapping[str, ExpertPatch], adapter: Adapter | None) -> None:
    both = sorted(set(patches) & set(adapter.experts if adapter else {}))
    if both:
        raise ContractError(
            f"weight view: {both[0]} has a patch of some experts and an adapter, needs one of them; give all experts "
            "of the layer as an override instead"
        )
