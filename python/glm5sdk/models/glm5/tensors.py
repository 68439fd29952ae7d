"""The tensors a config's checkpoint holds: Hugging Face names and shapes, and the parameter each one fills."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from glm5sdk.models.glm5.config import Glm5Config

Index = tuple[int | slice, ...]

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint.

    Attributes:
        name: Hugging Face name.
        shape: its shape, [out, in] for a projection.
        parameter: name of the model parameter it fills (equal to `name` but for experts, which are fused per layer).
        index: where in that parameter it lies, or None for all of it. Experts: (e, rows) in `experts.gate_up_proj`
            [E, 2I, N], gate rows first, and (e,) in `experts.down_proj` [E, N, I].
        keep_f32: stored and held in float32 whatever the model's dtype.
        duplicate_of: for a tensor that may be left out, the one it then equals; None for a required tensor.
    """

    name: str
    shape: tuple[int, ...]
    parameter: str
    index: Index | None = None
    keep_f32: bool = False
    duplicate_of: str | None = None

    @property
    def required(self) -> bool:
        """Whether every checkpoint holds this tensor."""
        return self.duplicate_of is None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def layer_prefix(layer: int) -> str:
    """The name prefix of a layer's tensors; the MTP layer is number num_hidden_layers."""
    return f"model.layers.{layer}."


def mtp_prefix(config: Glm5Config) -> str:
    """The prefix under which a checkpoint keeps MTP tensors, whether or not the config has the layer."""
    return layer_prefix(config.num_hidden_layers)


def expected_tensors(config: Glm5Config, mtp: bool = True) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint of this config, layer by layer; optional ones have `duplicate_of`.

    Args:
        config: the model.
        mtp: leave the MTP layer out when False. Without effect on a config that has none.
    """
    yield _plain(EMBEDDING, config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        yield from _layer(config, layer)
    yield _plain("model.norm.weight", config.hidden_size)
    tied = EMBEDDING if config.tie_word_embeddings else None
    yield _plain(LM_HEAD, config.vocab_size, config.hidden_size, duplicate_of=tied)
    if mtp and config.num_nextn_predict_layers:
        yield from _mtp(config)


def parameter_shapes(config: Glm5Config) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter (and the router bias) of the model: fused experts, no optional duplicates."""
    shapes: dict[str, tuple[int, ...]] = {}
    width, inner, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    for spec in expected_tensors(config):
        if not spec.required:
            continue
        if spec.index is None:
            shapes[spec.parameter] = spec.shape
        elif spec.parameter.endswith("gate_up_proj"):
            shapes[spec.parameter] = (experts, 2 * inner, width)
        else:
            shapes[spec.parameter] = (experts, width, inner)
    return shapes


def count_parameters(config: Glm5Config, mtp: bool = True) -> int:
    """Exact number of trained numbers: duplicates (tied or MTP heads) count once, router biases (state) not at all."""
    return sum(spec.numel for spec in expected_tensors(config, mtp) if spec.required and not spec.keep_f32)


def count_active_parameters(config: Glm5Config) -> int:
    """Numbers that multiply one token in a forward without MTP: its own experts, and not the input embedding."""
    total = 0
    for spec in expected_tensors(config, mtp=False):
        if not spec.required or spec.keep_f32:
            continue
        if spec.name == EMBEDDING and not config.tie_word_embeddings:
            continue
        if spec.index is None or spec.index[0] in range(config.num_experts_per_tok):
            total += spec.numel
    return total


def _plain(name: str, *shape: int, duplicate_of: str | None = None) -> TensorSpec:
    return TensorSpec(name, shape, name, duplicate_of=duplicate_of)


def _layer(config: Glm5Config, layer: int) -> Iterator[TensorSpec]:
    prefix, width = layer_prefix(layer), config.hidden_size
    yield _plain(prefix + "input_layernorm.weight", width)
    yield _plain(prefix + "post_attention_layernorm.weight", width)
    yield from _attention(config, prefix + "self_attn.")
    if config.has_indexer(layer):
        yield from _indexer(config, prefix + "self_attn.indexer.")
    if config.is_moe(layer):
        yield from _experts(config, prefix + "mlp.")
    else:
        yield from _mlp(prefix + "mlp.", width, config.intermediate_size)


def _attention(config: Glm5Config, prefix: str) -> Iterator[TensorSpec]:
    width, heads = config.hidden_size, config.num_attention_heads
    yield _plain(prefix + "q_a_proj.weight", config.q_lora_rank, width)
    yield _plain(prefix + "q_a_layernorm.weight", config.q_lora_rank)
    yield _plain(prefix + "q_b_proj.weight", heads * config.qk_head_dim, config.q_lora_rank)
    yield _plain(prefix + "kv_a_proj_with_mqa.weight", config.kv_width, width)
    yield _plain(prefix + "kv_a_layernorm.weight", config.kv_lora_rank)
    per_head = config.qk_nope_head_dim + config.v_head_dim
    yield _plain(prefix + "kv_b_proj.weight", heads * per_head, config.kv_lora_rank)
    yield _plain(prefix + "o_proj.weight", width, heads * config.v_head_dim)


def _indexer(config: Glm5Config, prefix: str) -> Iterator[TensorSpec]:
    dim = config.index_head_dim
    yield _plain(prefix + "wq_b.weight", config.index_n_heads * dim, config.q_lora_rank)
    yield _plain(prefix + "wk.weight", dim, config.hidden_size)
    yield _plain(prefix + "k_norm.weight", dim)
    yield _plain(prefix + "k_norm.bias", dim)
    yield _plain(prefix + "weights_proj.weight", config.index_n_heads, config.hidden_size)


def _mlp(prefix: str, width: int, inner: int) -> Iterator[TensorSpec]:
    yield _plain(prefix + "gate_proj.weight", inner, width)
    yield _plain(prefix + "up_proj.weight", inner, width)
    yield _plain(prefix + "down_proj.weight", width, inner)


def _experts(config: Glm5Config, prefix: str) -> Iterator[TensorSpec]:
    width, inner = config.hidden_size, config.moe_intermediate_size
    yield _plain(prefix + "gate.weight", config.n_routed_experts, width)
    if config.has_router_bias:
        name = prefix + "gate.e_score_correction_bias"
        # A large offset with a tiny spread: any shorter dtype rounds the differences away.
        yield TensorSpec(name, (config.n_routed_experts,), name, keep_f32=True)
    if config.n_shared_experts:
        yield from _mlp(prefix + "shared_experts.", width, config.shared_intermediate_size)
    gate_up, down = prefix + "experts.gate_up_proj", prefix + "experts.down_proj"
    for e in range(config.n_routed_experts):
        expert = f"{prefix}experts.{e}."
        yield TensorSpec(expert + "gate_proj.weight", (inner, width), gate_up, (e, slice(0, inner)))
        yield TensorSpec(expert + "up_proj.weight", (inner, width), gate_up, (e, slice(inner, 2 * inner)))
        yield TensorSpec(expert + "down_proj.weight", (width, inner), down, (e,))


def _mtp(config: Glm5Config) -> Iterator[TensorSpec]:
    layer, width = config.num_hidden_layers, config.hidden_size
    prefix = layer_prefix(layer)
    yield _plain(prefix + "enorm.weight", width)
    yield _plain(prefix + "hnorm.weight", width)
    yield _plain(prefix + "eh_proj.weight", width, 2 * width)
    yield from _layer(config, layer)
    yield _plain(prefix + "shared_head.norm.weight", width)
    # GLM-5 does not store these two; DeepSeek-V3.2 stores copies of the main model's.
    yield _plain(prefix + "embed_tokens.weight", config.vocab_size, width, duplicate_of=EMBEDDING)
    head = EMBEDDING if config.tie_word_embeddings else LM_HEAD
    yield _plain(prefix + "shared_head.head.weight", config.vocab_size, width, duplicate_of=head)
