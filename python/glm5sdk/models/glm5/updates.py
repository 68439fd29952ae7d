"""New weights for a model that is being used: a checked WeightView from a whole or a partial checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.models.glm5.checkpoint import Checkpoint, float_weight, open_checkpoint
from glm5sdk.models.glm5.config import Glm5Config
from glm5sdk.models.glm5.expert_files import CheckpointExperts, OpenFiles
from glm5sdk.models.glm5.model import Glm5ForCausalLM
from glm5sdk.models.glm5.tensors import TensorSpec
from glm5sdk.nn.moe import ExpertPatch, Experts
from glm5sdk.nn.offload import OffloadedExperts
from glm5sdk.nn.weight_view import WeightView
from glm5sdk.ops._weights import part_index
from glm5sdk.registry.weight import Weight, WeightLike

__all__ = ["WeightUpdate", "load_update", "read_update"]

# What may differ between a model and an update of it: nothing that changes shapes or arithmetic.
_FREE = {"extra", "dtype", "latent_norm_eps", "eos_token_id", "bos_token_id", "pad_token_id", "initializer_range",
         "num_nextn_predict_layers", "max_position_embeddings", "attention_dropout"}  # fmt: skip


@dataclass(frozen=True, eq=False)
class WeightUpdate:
    """New weights that were read and checked, to be put over any base view of the model that they were read for.

    Attributes:
        version: as the caller named it, or None.
        digest: of the contents, whatever files they lay in.
        whole: it holds every weight of the model.
        overrides, patches, sources: see `WeightView.replaced`.
    """

    version: str | None
    digest: str
    whole: bool
    overrides: Mapping[str, WeightLike]
    patches: Mapping[str, ExpertPatch]
    sources: Mapping[str, CheckpointExperts]

    def on(self, base: WeightView) -> WeightView:
        """These weights, and `base`'s where they have none. Costs no reading and no copy of what `base` has.

        Without a version of its own a whole update is named by its contents, a partial one by them and the base's name.

        Raises:
            ContractError: `base` has an adapter; add it to the result instead.
        """
        _refuse_adapter(base)
        named = self.digest if self.whole else _hash((base.version, self.digest))
        version = named if self.version is None else self.version
        return base.replaced(version, self.overrides, self.patches, self.sources)


def load_update(
    path: str | PathLike[str], model: Glm5ForCausalLM, base: WeightView, version: str | None = None
) -> WeightView:
    """`read_update`, put over the base that it was read for."""
    return read_update(path, model, base, version).on(base)


def read_update(
    path: str | PathLike[str], model: Glm5ForCausalLM, base: WeightView, version: str | None = None
) -> WeightUpdate:
    """Read new weights beside the ones in use. The model and `base` stay as they are, whatever happens.

    The checkpoint may hold all parameters, or any of them: whole layers, norms, single experts. What it lacks stays
    the base's. Single experts come as a patch that costs its own memory alone; all experts of a layer replace its fused
    weights, or, where they are offloaded, are read once to be checked and stay on disk.
    Floats are rounded to the model's dtype once, as `from_pretrained` does; quantised weights have to be of the model's
    kind where the model keeps them quantised.

    Args:
        path: directory or .safetensors file; a config.json beside it is compared with the model's.
        model: the model that `base` belongs to.
        base: any view of it without an adapter; tells names, shapes and kinds.
        version: of the new weights; None makes one from the contents.

    Raises:
        CheckpointError: a file is damaged, a tensor is unknown, misshapen, of another kind or holds infinity or NaN,
            an expert is incomplete, or the config is another model's.
        ContractError: `base` has an adapter.
    """
    _refuse_adapter(base)
    root = Path(path)
    _check_config(root.parent if root.is_file() else root, model.config)
    checkpoint = open_checkpoint(root, model.config, partial=True)
    specs = checkpoint.specs()
    if not specs:
        raise CheckpointError(f"checkpoint: {root} holds no tensor of the model, needs at least one")
    modules = {name: m for name, m in model.named_modules() if isinstance(m, Experts)}
    new = _NewWeights(checkpoint, base, modules, specs)
    digests: dict[str, bytes] = {}
    for spec, value in checkpoint.weights(new.is_here):
        digests[spec.name] = new.take(spec, value)
        del value
    digest = _hash(sorted(digests.items()))
    held = {spec.name for spec in specs}
    whole = all(spec.name in held for spec in checkpoint.every_spec() if spec.required)
    patches = new.patches()
    return WeightUpdate(version, digest, whole, new.overrides, patches, new.sources)


class _NewWeights:
    """Memory for what a checkpoint holds, made for all of it before the first tensor is read."""

    def __init__(
        self, checkpoint: Checkpoint, base: WeightView, modules: dict[str, Experts], specs: list[TensorSpec]
    ) -> None:
        self._checkpoint, self._base, self._modules = checkpoint, base, modules
        self.overrides: dict[str, WeightLike] = {}
        self.sources: dict[str, CheckpointExperts] = {}
        self._copies: dict[str, str] = {}
        self._fused: dict[str, tuple[list[int], dict[str, WeightLike]]] = {}
        held: dict[str, dict[int, set[str]]] = {}
        for spec in specs:
            if spec.index is not None:
                layer = spec.parameter.rpartition(".")[0]
                parts = held.setdefault(layer, {}).setdefault(_expert(spec), set())
                parts.add(spec.name.split(".")[-2])
            elif base.weight(spec.parameter) is None:
                raise CheckpointError(f"checkpoint: {spec.name} in {self._file(spec)} is no parameter of this model")
        self._check_copies(specs)
        files = OpenFiles()
        for layer, experts in held.items():
            torn = [e for e, parts in experts.items() if len(parts) != 3]
            if torn:
                has = ", ".join(sorted(experts[torn[0]]))
                raise CheckpointError(
                    f"checkpoint: {checkpoint.path} has only {has} of {layer}.{torn[0]}, needs gate_proj, "
                    "up_proj and down_proj of each expert that it holds"
                )
            module = modules[layer]
            if isinstance(module, OffloadedExperts) and len(experts) == module.count:
                kinds = {n: weight.kind for n, weight in _weights_like(module).items() if isinstance(weight, Weight)}
                self.sources[layer] = CheckpointExperts(checkpoint, layer, kinds, files)
                continue
            own = sorted(e - module.first for e in experts if 0 <= e - module.first < module.count)
            if own:
                self._fused[layer] = own, {n: _empty(weight, len(own)) for n, weight in _weights_like(module).items()}

    def is_here(self, spec: TensorSpec) -> bool:
        """Whether this process holds the tensor's place: not another one's expert."""
        if spec.index is None:
            return True
        module = self._modules[spec.parameter.rpartition(".")[0]]
        return 0 <= _expert(spec) - module.first < module.count

    def take(self, spec: TensorSpec, value: Tensor | Weight) -> bytes:
        """Convert, check and keep one tensor; the digest of what was stored."""
        if spec.index is None:
            like = self._base.weight(spec.parameter)
            assert like is not None  # checked when the names were
            made = _fitting(like, value, self._where(spec))
            self.overrides[spec.parameter] = made
        else:
            layer, _, name = spec.parameter.rpartition(".")
            if layer in self.sources:
                _fitting(_weights_like(self._modules[layer])[name], value, self._where(spec))
                return _digest(value)
            ids, weights = self._fused[layer]
            into = weights[name]
            made = _fitting(into, value, self._where(spec))
            index = (ids.index(_expert(spec) - self._modules[layer].first), *spec.index[1:])
            if isinstance(into, Weight) and isinstance(made, Weight):
                for i, (target, part) in enumerate(zip(into.tensors, made.tensors, strict=True)):
                    target[part_index(into.kind, i, index)] = part
            elif isinstance(into, Tensor) and isinstance(made, Tensor):
                into[index] = made
        return _digest(value)

    def patches(self) -> dict[str, ExpertPatch]:
        """To be called at the end: layers with some new experts; those with new ones throughout go to `overrides`."""
        self.overrides.update({name: self.overrides[original] for name, original in self._copies.items()})
        found = {}
        for layer, (ids, weights) in self._fused.items():
            if len(ids) == self._modules[layer].count and self._base.weight(f"{layer}.gate_up_proj") is not None:
                self.overrides.update({f"{layer}.{name}": weight for name, weight in weights.items()})
            else:
                found[layer] = ExpertPatch(tuple(ids), weights["gate_up_proj"], weights["down_proj"])
        return found

    def _check_copies(self, specs: list[TensorSpec]) -> None:
        """A model with an MTP head or embedding of its own must not keep the old one beside a new main one.

        A checkpoint may hold an equal copy, which is not read again.
        """
        names = {spec.parameter for spec in specs}
        for spec in self._checkpoint.every_spec():
            original = spec.duplicate_of
            if original not in names or spec.parameter in names or spec.parameter == "lm_head.weight":
                continue
            if self._base.weight(spec.parameter) is None:
                continue
            if spec.name not in self._checkpoint.kinds:
                raise CheckpointError(
                    f"checkpoint: {self._checkpoint.path} has {original} and not {spec.name}, needs both: this model "
                    "keeps a different matrix for its MTP layer"
                )
            self._copies[spec.parameter] = original

    def _file(self, spec: TensorSpec) -> Path:
        return self._checkpoint.stored_parts(spec)[0].file

    def _where(self, spec: TensorSpec) -> str:
        return f"checkpoint: {spec.name} in {self._file(spec)}"


def _refuse_adapter(base: WeightView) -> None:
    if base.adapter is not None:
        raise ContractError(f"load_update: base {base.version!r} has an adapter, needs none; add it afterwards")


def _hash(parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()


def _weights_like(experts: Experts) -> dict[str, WeightLike]:
    return dict(zip(("gate_up_proj", "down_proj"), experts.weights_like(), strict=True))


def _expert(spec: TensorSpec) -> int:
    assert spec.index is not None
    assert isinstance(spec.index[0], int)
    return spec.index[0]


def _check_config(folder: Path, config: Glm5Config) -> None:
    if not (folder / "config.json").is_file():
        return
    theirs = Glm5Config.from_pretrained(folder)
    for f in dataclasses.fields(Glm5Config):
        got, want = getattr(theirs, f.name), getattr(config, f.name)
        if f.name not in _FREE and got != want:
            raise CheckpointError(
                f"checkpoint: {f.name} in {folder / 'config.json'} is {got!r}, needs the model's {want!r}"
            )


def _empty(like: WeightLike, lead: int) -> WeightLike:
    def make(t: Tensor) -> Tensor:
        return torch.empty(lead, *t.shape[1:], dtype=t.dtype, device=t.device)

    if isinstance(like, Weight):
        return Weight(like.kind, like.layout, (lead, *like.shape[1:]), tuple(make(t) for t in like.tensors))
    return make(like)


def _fitting(like: WeightLike, value: Tensor | Weight, where: str) -> Tensor | Weight:
    """A copy of `value` in the form of `like`.

    Raises:
        CheckpointError: it is of another kind, or not all of it is a number.
    """
    if isinstance(like, Weight):
        if not isinstance(value, Weight) or value.kind != like.kind:
            got = value.kind if isinstance(value, Weight) else "plain"
            raise CheckpointError(f"{where} is {got}, needs {like.kind}, which this model keeps quantised")
        made: Tensor | Weight = value.map(lambda t: t.to(like.device, copy=True))
    elif isinstance(value, Weight):
        made = float_weight(value, like.dtype).to(like.device)
    else:
        made = value.to(like.device, like.dtype, copy=True)
    for tensor in made.tensors if isinstance(made, Weight) else (made,):
        if tensor.is_floating_point() and not _is_finite(tensor):
            raise CheckpointError(f"{where} holds infinity or NaN as {tensor.dtype}, needs numbers")
    return made


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype == torch.float8_e4m3fn:  # has no infinity, and isfinite does not know it
        return not bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any())
    return bool(tensor.isfinite().all())


def _digest(value: Tensor | Weight) -> bytes:
    hashed = hashlib.blake2b(digest_size=16)
    for tensor in value.tensors if isinstance(value, Weight) else (value,):
        hashed.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        hashed.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return hashed.digest()
