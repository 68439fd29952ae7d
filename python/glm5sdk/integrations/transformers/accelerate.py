"""accelerate and restore: put our forwards into a model's modules and take them out again."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import nn

from glm5sdk.core.errors import ContractError, UnavailableError

try:
    import transformers
    from transformers import GlmMoeDsaForCausalLM
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm
except ImportError as error:
    raise UnavailableError(
        f"transformers integration: GlmMoeDsaForCausalLM cannot be imported ({error}), needs transformers >= 5.16; "
        "pip install 'transformers>=5.16'"
    ) from error

from glm5sdk.integrations.transformers.attention import AttentionForward
from glm5sdk.integrations.transformers.cache import check_cache_keyword
from glm5sdk.integrations.transformers.feed_forward import (
    EXPERTS,
    GateForward,
    LinearForward,
    MlpForward,
    NormForward,
)
from glm5sdk.integrations.transformers.replaced import Replaced, plain_linear, plain_norm
from glm5sdk.integrations.transformers.visibility import StepReader
from glm5sdk.models.glm5 import Glm5Config
from glm5sdk.models.glm5.decoder import attention_sizes
from glm5sdk.nn.rope import RopeTable

__all__ = ["Acceleration", "accelerate", "restore"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OLDEST = (5, 16)  # earlier ones compute full attention, or rotate otherwise


class Acceleration:
    """What `accelerate` returns: leave its `with` block, or call `restore`, to undo it."""

    def __init__(self, model: GlmMoeDsaForCausalLM) -> None:
        self.model = model

    def restore(self) -> None:
        """As the function of that name."""
        restore(self.model)

    def __enter__(self) -> GlmMoeDsaForCausalLM:
        return self.model

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.restore()


class _ModelForward(Replaced):
    """GlmMoeDsaModel.forward, after a look at what our attention cannot give.

    Attributes:
        experts: the model's experts implementation before.
    """

    def __init__(self, module: nn.Module, experts: str | None) -> None:
        super().__init__(module)
        self.experts = experts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        config = self.module.config
        wanted = kwargs.get("output_attentions")
        if config.output_attentions if wanted is None else wanted:
            raise ContractError(
                "accelerated model: output_attentions is set, needs False: attention weights are never written down; "
                "restore() the model to see them"
            )
        return self.original(*args, **kwargs)


def accelerate(model: GlmMoeDsaForCausalLM) -> Acceleration:
    """Let a GlmMoeDsaForCausalLM of transformers compute with glm5sdk's ops.

    Attention (indexer, selection and latent cache included), router, experts, dense layers, norms and head are
    replaced; embedding, masks, cache objects, losses and `generate` stay transformers'. Gradients go where they went,
    in one pass over a whole sequence, with or without gradient checkpointing. Rounding points are ours
    (docs/numerics.md): in float32 logits agree to about 1e-5; in bfloat16 ours are closer to float64, and now and then
    another expert or key is chosen. A tie between keys goes to the earlier one.

    Args:
        model: of exactly that class, in float32, bfloat16, float16 or float64, on one device.

    Returns:
        A handle to undo it; also a context manager.

    Raises:
        ContractError: another class or version, a config or module that our ops do not compute; nothing was changed.
    """
    config = _check(model)
    rotary = model.model.rotary_emb
    rope = RopeTable(
        tuple(rotary.inv_freq.tolist()), float(rotary.attention_scaling), model.config.max_position_embeddings
    )
    reader, sizes = StepReader(), attention_sizes(config)
    forwards: list[Replaced] = [
        _ModelForward(model.model, model.config._experts_implementation),
        NormForward(model.model.norm),
        LinearForward(model.lm_head),
    ]
    for layer in model.model.layers:
        forwards += [AttentionForward(layer.self_attn, sizes, rope, reader)]
        forwards += [NormForward(layer.input_layernorm), NormForward(layer.post_attention_layernorm)]
        if type(layer.mlp) is glm.GlmMoeDsaMoE:
            forwards += [GateForward(layer.mlp.gate), MlpForward(layer.mlp.shared_experts)]
        else:
            forwards.append(MlpForward(layer.mlp))
    for forward in forwards:
        forward.install()
    model.set_experts_implementation(EXPERTS)
    return Acceleration(model)


def restore(model: GlmMoeDsaForCausalLM) -> None:
    """Undo `accelerate`; a model that is not accelerated stays as it is. Caches begun before cannot be continued."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, Replaced):
            if isinstance(forward, _ModelForward):
                model.set_experts_implementation(forward.experts)
            del module.__dict__["forward"]


def _check(model: Any) -> Glm5Config:
    """The model's config in our words.

    Raises:
        ContractError: something in the model is not what our ops compute.
    """
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < OLDEST:
        raise ContractError(f"accelerate: transformers is {transformers.__version__}, needs at least 5.16")
    for kind in (glm.GlmMoeDsaAttention, glm.GlmMoeDsaDecoderLayer):
        check_cache_keyword(kind.forward)
    if type(model) is not GlmMoeDsaForCausalLM:
        raise ContractError(f"accelerate: model is {type(model).__name__}, needs GlmMoeDsaForCausalLM itself")
    if any(isinstance(m.__dict__.get("forward"), Replaced) for m in model.modules()):
        raise ContractError("accelerate: the model is accelerated, needs a plain one")
    config = _config(model)
    wanted = {
        "": {"model": glm.GlmMoeDsaModel, "lm_head": nn.Linear},
        "model": {
            "embed_tokens": nn.Embedding,
            "norm": glm.GlmMoeDsaRMSNorm,
            "rotary_emb": glm.GlmMoeDsaRotaryEmbedding,
        },
    }
    for i, layer in enumerate(model.model.layers):
        path = f"model.layers.{i}"
        norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), glm.GlmMoeDsaRMSNorm)
        wanted[path] = {**norms, "self_attn": glm.GlmMoeDsaAttention}
        if config.is_moe(i):
            wanted[path]["mlp"] = glm.GlmMoeDsaMoE
            wanted[f"{path}.mlp"] = {
                "gate": glm.GlmMoeDsaTopkRouter, "experts": glm.GlmMoeDsaExperts, "shared_experts": glm.GlmMoeDsaMLP,
            }  # fmt: skip
        else:
            wanted[path]["mlp"] = glm.GlmMoeDsaMLP
        if type(layer) is not glm.GlmMoeDsaDecoderLayer:
            raise ContractError(f"accelerate: {path} is {type(layer).__name__}, needs GlmMoeDsaDecoderLayer")
    for path, children in wanted.items():
        parent = model.get_submodule(path)
        for name, kind in children.items():
            child = parent._modules.get(name)
            if type(child) is not kind or "_hf_hook" in child.__dict__:
                got = type(child).__name__ if type(child) is not kind else "spread over devices by hooks"
                raise ContractError(f"accelerate: {path}.{name} is {got}, needs {kind.__name__}".replace(" .", " "))
    for i, layer in enumerate(model.model.layers):
        _check_attention(layer.self_attn, config, i)
        for mlp in (layer.mlp,) if not config.is_moe(i) else (layer.mlp.shared_experts,):
            for name in ("gate_proj", "up_proj", "down_proj"):
                plain_linear(mlp, name)
    _check_parameters(model)
    return config


def _config(model: GlmMoeDsaForCausalLM) -> Glm5Config:
    values = model.config.to_dict() | {"model_type": model.config.model_type, "num_nextn_predict_layers": 0}
    # The class rotates in pairs whatever its config says, and so do we.
    config = Glm5Config.from_dict(values | {"rope_interleave": True, "indexer_rope_interleave": True})
    eps = {m.variance_epsilon for layer in model.model.layers for m in _latent_norms(layer)}
    if len(eps) != 1:
        raise ContractError(f"accelerate: latent norms have eps {sorted(eps)}, needs one for all")
    if len(model.model.layers) != config.num_hidden_layers:
        raise ContractError(
            f"accelerate: model has {len(model.model.layers)} layers, needs {config.num_hidden_layers} as its config"
        )
    return config.replace(latent_norm_eps=eps.pop())


def _latent_norms(layer: Any) -> tuple[Any, ...]:
    attention = getattr(layer, "self_attn", None)
    if type(attention) is not glm.GlmMoeDsaAttention:
        raise ContractError(f"accelerate: self_attn is {type(attention).__name__}, needs GlmMoeDsaAttention")
    names = ("q_a_layernorm", "kv_a_layernorm")
    return tuple(plain_norm(attention, name, glm.GlmMoeDsaRMSNorm) for name in names)


def _check_attention(attention: Any, config: Glm5Config, layer: int) -> None:
    if (attention.indexer is not None) != config.has_indexer(layer):
        raise ContractError(
            f"accelerate: layer {layer} and the config disagree on who has an indexer, needs one answer"
        )
    if abs(attention.scaling / config.softmax_scale - 1) > 1e-6:
        raise ContractError(
            f"accelerate: layer {layer} scales scores by {attention.scaling}, needs {config.softmax_scale}"
        )


def _check_parameters(model: GlmMoeDsaForCausalLM) -> None:
    if kinds := sorted({type(p).__name__ for p in model.parameters()} - {"Parameter"}):
        raise ContractError(
            f"accelerate: parameters are of type {kinds}, needs plain ones: neither sharded nor quantised"
        )
    devices = {p.device for p in model.parameters()}
    dtypes = {p.dtype for name, p in model.named_parameters() if not name.endswith("mlp.gate.weight")}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise ContractError(f"accelerate: parameters are on {sorted(map(str, devices))}, needs one real device")
    if len(dtypes) != 1 or next(iter(dtypes)) not in DTYPES:
        raise ContractError(
            f"accelerate: parameters are {sorted(map(str, dtypes))}, needs one of {', '.join(map(str, DTYPES))} for all"
        )
