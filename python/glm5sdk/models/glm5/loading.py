"""From a checkpoint directory to a model and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.models.glm5.checkpoint import Checkpoint, open_checkpoint
from glm5sdk.models.glm5.checkpoint_forms import is_quantisable
from glm5sdk.models.glm5.checkpoint_save import checkpoint_tensors, save_checkpoint
from glm5sdk.models.glm5.config import Glm5Config
from glm5sdk.models.glm5.expert_placement import is_own_expert, put_in_slots, spread_experts
from glm5sdk.models.glm5.model import Glm5ForCausalLM
from glm5sdk.models.glm5.tensors import Index, expected_tensors
from glm5sdk.nn.layers import Embedding, Linear
from glm5sdk.nn.moe import Experts
from glm5sdk.nn.quantised import named_weights, quantised_like
from glm5sdk.ops._weights import dequantize_weight, part_index
from glm5sdk.parallel import ProcessGroup
from glm5sdk.registry.weight import Weight, load_weight

__all__ = ["from_pretrained", "save_pretrained"]

M = TypeVar("M", bound=Glm5ForCausalLM)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# Files that make a checkpoint usable for text; carried along when a loaded model is saved.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def from_pretrained(
    cls: type[M],
    path: str | PathLike[str],
    dtype: str = "auto",
    device: str = "cpu",
    latent_norm_eps: float | None = None,
    progress: bool | None = None,
    quantised: bool | None = None,
    expert_slots: int | None = None,
    expert_group: ProcessGroup | None = None,
) -> M:
    """Load a local Hugging Face checkpoint, streaming, so that the model is in memory once.

    Args:
        cls: the model class.
        path: directory with config.json and safetensors (one file or shards; bf16, f16, f32, FP8 block-scaled, int8
            channels or int4 groups).
        dtype: "float32", "bfloat16", "float16", "float64", or "auto" for the config's.
        device: where the parameters live.
        latent_norm_eps: eps of the latent norms: 1e-5 as GLM-5 is trained and served, 1e-6 to compute exactly what
            transformers computes. None: the config's.
        progress: show a bar; None: for large models on a terminal.
        quantised: True keeps quantised weights as they are stored, for ops that multiply with them; False dequantises
            them. None: integers are kept, FP8 is dequantised. kv_b_proj, heads and the like are always dequantised.
        expert_slots: leave routed experts on disk and keep so many a layer in memory; see `offload_experts`.
        expert_group: load this process's share of the routed experts; see `spread_experts`.

    Raises:
        CheckpointError: a file or tensor is missing, unexpected, misshapen or damaged; the message names it.
        ContractError: the config or an argument is invalid.
    """
    config = Glm5Config.from_pretrained(path)
    if latent_norm_eps is not None:
        config = config.replace(latent_norm_eps=latent_norm_eps)
    target = _dtype_of(config.dtype if dtype == "auto" else dtype)
    checkpoint = open_checkpoint(path, config)
    if expert_slots is not None and expert_group is not None:
        raise ContractError("from_pretrained: expert_slots and expert_group are both given, needs one of them at most")
    kept = _kept_kinds(checkpoint, quantised)
    with torch.device("meta"):
        model = cls(checkpoint.config)
    for name in sorted(checkpoint.untied):
        _add_untied(model, name)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    if expert_slots is not None:
        put_in_slots(model, checkpoint, kept, expert_slots, None, target, device)
        kept = {name: kind for name, kind in kept.items() if ".mlp.experts." not in name}
    _make_quantised(model, kept)
    if expert_group is not None:
        spread_experts(model, expert_group)
    model.to_empty(device=device).to(target)
    if config.tie_word_embeddings:  # to_empty makes two tensors of one
        model.lm_head.weight = model.model.embed_tokens.weight
    weights = _weights_by_name(model)

    def write(name: str, index: Index | None, value: Tensor | Weight) -> None:
        if name not in weights:
            raise CheckpointError(f"checkpoint: {name} fits no parameter of the model")
        into = weights[name]
        if index is not None:
            index = _local(index, model.get_submodule(name.rpartition(".")[0]))
        if isinstance(into, Weight) and isinstance(value, Weight):
            for i, (tensor, part) in enumerate(zip(into.tensors, value.tensors, strict=True)):
                load_weight(tensor, part, None if index is None else part_index(into.kind, i, index))
        elif isinstance(into, Tensor):
            load_weight(into, dequantize_weight(value, target) if isinstance(value, Weight) else value, index)

    checkpoint.load_weights_into(write, progress, lambda spec: is_own_expert(model, spec))
    model.companions = {name: Path(path) / name for name in COMPANIONS if (Path(path) / name).is_file()}
    return model.eval()


def save_pretrained(
    model: Glm5ForCausalLM,
    path: str | PathLike[str],
    max_shard_bytes: int,
    extra_files: Mapping[str, bytes | PathLike[str]] | None = None,
) -> None:
    """Write config.json and safetensors in Hugging Face layout and names, atomically; router biases stay float32.

    Quantised weights are written as they are; see checkpoint_forms.py. `extra_files` appear with the rest, by name.
    """
    elsewhere = [n for n, m in model.named_modules() if isinstance(m, Experts) and not m.whole]
    if elsewhere:
        raise ContractError(
            f"save_pretrained: {elsewhere[0]} is not whole in memory, needs a model with all its experts"
        )
    weights = _weights_by_name(model)
    untied = {name for name in weights if name.endswith((".shared_head.head.weight", ".embed_tokens.weight"))}
    untied.discard("model.embed_tokens.weight")
    named = checkpoint_tensors(model.config, weights.__getitem__, None, untied)
    extra = {**_companions(model, path), **(extra_files or {})}
    save_checkpoint(path, model.config, _in_model_dtype(named, model.dtype), max_shard_bytes, extra)


def _local(index: Index, experts: nn.Module) -> Index:
    """An index into all experts of a layer as one into those of this process."""
    assert isinstance(experts, Experts)
    assert isinstance(index[0], int)
    return (index[0] - experts.first, *index[1:])


def _companions(model: Glm5ForCausalLM, path: str | PathLike[str]) -> dict[str, bytes | PathLike[str]]:
    """Tokenizer files of the checkpoint the model came from, unless they lie there already."""
    return {n: f for n, f in model.companions.items() if f.is_file() and f.parent.resolve() != Path(path).resolve()}


def _in_model_dtype(named: Iterator[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Router weights live in float32; those that the model's dtype holds exactly are stored in it, as published."""
    for name, tensor in named:
        if name.endswith(".mlp.gate.weight") and tensor.dtype != dtype:
            short = tensor.to(dtype)
            tensor = short if torch.equal(short.to(tensor.dtype), tensor) else tensor
        yield name, tensor


def _dtype_of(name: str) -> torch.dtype:
    short = str(name).removeprefix("torch.")
    if short not in _DTYPES:
        raise ContractError(f"from_pretrained: dtype is {name!r}, needs one of: auto, {', '.join(_DTYPES)}")
    return _DTYPES[short]


def _kept_kinds(checkpoint: Checkpoint, quantised: bool | None) -> dict[str, str]:
    """Kind of each parameter whose weight stays quantised.

    Raises:
        CheckpointError: experts of one layer are of several kinds, share FP8 blocks, or are meant for activations that
            ops do not give them.
    """
    config = checkpoint.config
    wanted = {None: ("w8a8", "w4a8"), True: ("fp8", "w8a8", "w4a8"), False: ()}[quantised]
    found: dict[str, set[str]] = {}
    for spec in expected_tensors(config):
        if spec.name in checkpoint.kinds and is_quantisable(spec.name, spec.shape):
            found.setdefault(spec.parameter, set()).add(checkpoint.kinds[spec.name])
    kept: dict[str, str] = {}
    for name, kinds in found.items():
        if len(kinds) > 1 and kinds & set(wanted):
            raise CheckpointError(
                f"checkpoint: experts of {name} are {', '.join(sorted(kinds))}, needs one kind for all; load with "
                "quantised=False to dequantise them"
            )
        if (kind := next(iter(kinds))) in wanted:
            kept[name] = kind
    if config.moe_intermediate_size % 128 and any(n.endswith("gate_up_proj") and k == "fp8" for n, k in kept.items()):
        raise CheckpointError(
            f"checkpoint: moe_intermediate_size is {config.moe_intermediate_size}, needs a multiple of 128 to keep FP8 "
            "experts; load with quantised=False to dequantise them"
        )
    if kept:
        checkpoint.check_activations()
    return kept


def _make_quantised(model: nn.Module, kinds: Mapping[str, str]) -> None:
    """Put quantised modules in the place of float ones whose parameters are named in `kinds`."""
    by_module: dict[str, dict[str, str]] = {}
    for name, kind in kinds.items():
        module, _, weight = name.rpartition(".")
        by_module.setdefault(module, {})[weight] = kind
    for path, parts in by_module.items():
        parent, _, name = path.rpartition(".")
        try:
            setattr(model.get_submodule(parent), name, quantised_like(model.get_submodule(path), parts))
        except ContractError as error:
            raise CheckpointError(f"checkpoint: {path} cannot stay quantised: {error}") from error


def _weights_by_name(model: nn.Module) -> dict[str, Tensor | Weight]:
    plain = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return {**plain, **dict(named_weights(model))}


def _add_untied(model: Glm5ForCausalLM, name: str) -> None:
    """Give the MTP layer an embedding or head of its own, because the checkpoint stores a different one."""
    c, mtp = model.config, model.model.mtp
    if mtp is None:
        return
    with torch.device("meta"):
        if name.endswith(".embed_tokens.weight"):
            mtp.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        elif name.endswith(".shared_head.head.weight"):
            mtp.shared_head.head = Linear(c.hidden_size, c.vocab_size)
