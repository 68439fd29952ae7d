"""From a checkpoint directory to a model and back."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.models.glm5.checkpoint import open_checkpoint
from glm5sdk.models.glm5.checkpoint_save import checkpoint_tensors, save_checkpoint
from glm5sdk.models.glm5.config import Glm5Config
from glm5sdk.models.glm5.model import Glm5ForCausalLM
from glm5sdk.models.glm5.tensors import Index
from glm5sdk.nn.layers import Embedding, Linear
from glm5sdk.registry.weight import load_weight

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
) -> M:
    """Load a local Hugging Face checkpoint, streaming, so that the model is in memory once.

    Args:
        cls: the model class.
        path: directory with config.json and safetensors (one file or shards; bf16, f16, f32 or FP8 block-scaled).
        dtype: "float32", "bfloat16", "float16", "float64", or "auto" for the config's. FP8 weights are dequantised.
        device: where the parameters live.
        latent_norm_eps: eps of the latent norms: 1e-5 as GLM-5 is trained and served, 1e-6 to compute exactly what
            transformers computes. None: the config's.
        progress: show a bar; None: for large models on a terminal.

    Raises:
        CheckpointError: a file or tensor is missing, unexpected, misshapen or damaged; the message names it.
        ContractError: the config or an argument is invalid.
    """
    config = Glm5Config.from_pretrained(path)
    if latent_norm_eps is not None:
        config = config.replace(latent_norm_eps=latent_norm_eps)
    target = _dtype_of(config.dtype if dtype == "auto" else dtype)
    checkpoint = open_checkpoint(path, config)
    with torch.device("meta"):
        model = cls(checkpoint.config)
    for name in sorted(checkpoint.untied):
        _add_untied(model, name)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.to_empty(device=device).to(target)
    if config.tie_word_embeddings:  # to_empty makes two tensors of one
        model.lm_head.weight = model.model.embed_tokens.weight
    tensors = _tensors_by_name(model)

    def write(name: str, index: Index | None, value: Tensor) -> None:
        if name not in tensors:
            raise CheckpointError(f"checkpoint: {name} fits no parameter of the model")
        load_weight(tensors[name], value, index)

    checkpoint.load_into(write, target, progress)
    model.companions = {name: Path(path) / name for name in COMPANIONS if (Path(path) / name).is_file()}
    return model.eval()


def save_pretrained(model: Glm5ForCausalLM, path: str | PathLike[str], max_shard_bytes: int) -> None:
    """Write config.json and safetensors in Hugging Face layout and names, atomically; router biases stay float32."""
    tensors = _tensors_by_name(model)
    untied = {name for name in tensors if name.endswith((".shared_head.head.weight", ".embed_tokens.weight"))}
    untied.discard("model.embed_tokens.weight")
    named = checkpoint_tensors(model.config, tensors.__getitem__, None, untied)
    save_checkpoint(path, model.config, _in_model_dtype(named, model.dtype), max_shard_bytes, _companions(model, path))


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


def _tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


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
