"""Glm5Config: everything that decides a GLM-5 model's shapes and arithmetic, checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import Any

from glm5sdk.models.glm5 import config_checks, config_json
from glm5sdk.models.glm5.rope import YarnScaling, inverse_frequencies
from glm5sdk.models.glm5.schedule import FULL, indexer_sources, resolve_indexer_types


@dataclass(frozen=True)
class Glm5Config:
    """The config of a `glm_moe_dsa` (GLM-5, 5.1, 5.2, 5.3) or `deepseek_v32` model; the defaults are GLM-5's.

    Field names are those of a Hugging Face config.json; the last group is this SDK's own. A made config is valid:
    every contradiction raises `ContractError` here and not at the first forward. Change one with `replace`.

    Attributes that are not plain from their name:
        qk_nope_head_dim, qk_rope_head_dim: the parts of a query or key head without and with rotary position.
        moe_intermediate_size: width of one expert; the shared expert has `n_shared_experts` times it.
        topk_method: "noaux_tc" (a stored bias corrects the choice of experts) or "greedy" (no bias tensor).
        moe_router_dtype: dtype of the router's product as the file names it; only float32 (or nothing) is accepted.
        index_topk: keys each query attends to; index_n_heads, index_head_dim: the indexer's own heads.
        indexer_types, index_topk_pattern, index_topk_freq, index_skip_topk_offset: see `schedule`; the first that is
            given wins. The resolved answer is `indexer_schedule`.
        mlp_layer_types: "dense" or "sparse" per layer; None follows first_k_dense_replace.
        rope_theta, rope_scaling: base of the rotary frequencies, and YaRN settings or None.
        num_nextn_predict_layers: 1 when the model has its multi-token-prediction layer (index num_hidden_layers).
        eos_token_id: every token that ends generation.
        dtype: dtype name of the weights as published.

        latent_norm_eps: eps of q_a_layernorm and kv_a_layernorm. 1e-5 is what GLM-5 was trained and is served with;
            transformers uses 1e-6 (see `hf_compat`), as does deepseek_v32.
        router_temperature: divides the router's logits.
        swiglu_limit: clamp of gate and up before SwiGLU, or None.
        sparse_pattern: "indexer" (the learned selection), or "window_stride": the last `sparse_window` keys and every
            `sparse_stride`-th earlier one, without any indexer.
        extra: keys of config.json that mean nothing here, kept for writing it back.
    """

    model_type: str = "glm_moe_dsa"
    vocab_size: int = 154880
    hidden_size: int = 6144
    intermediate_size: int = 12288
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 78
    num_attention_heads: int = 64
    q_lora_rank: int = 2048
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 192
    qk_rope_head_dim: int = 64
    v_head_dim: int = 256
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    first_k_dense_replace: int = 3
    mlp_layer_types: tuple[str, ...] | None = None
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 1
    topk_group: int = 1
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    moe_router_dtype: str | None = None

    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 2048
    indexer_rope_interleave: bool = True
    indexer_types: tuple[str, ...] | None = None
    index_topk_pattern: str | tuple[str, ...] | None = None
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2
    index_share_for_mtp_iteration: bool = False

    rope_theta: float = 1_000_000.0
    rope_scaling: YarnScaling | None = None
    rope_interleave: bool = True
    max_position_embeddings: int = 202752

    num_nextn_predict_layers: int = 1
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str = "bfloat16"

    latent_norm_eps: float = 1e-5
    router_temperature: float = 1.0
    swiglu_limit: float | None = None
    sparse_pattern: str = "indexer"
    sparse_window: int = 512
    sparse_stride: int = 64
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, value in config_checks.normalised(self).items():
            object.__setattr__(self, name, value)
        config_checks.check(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Glm5Config:
        """Reads the contents of a Hugging Face config.json.

        Raises:
            ContractError: another architecture, a missing or contradictory value; the message names the field.
        """
        return cls(**config_json.fields_from_dict(values))

    @classmethod
    def from_pretrained(cls, path: str | PathLike[str]) -> Glm5Config:
        """Reads `config.json` of a local checkpoint directory.

        Raises:
            CheckpointError: there is no such file, or it is not JSON.
            ContractError: as `from_dict`.
        """
        return cls.from_dict(config_json.read_config_file(path))

    def to_dict(self) -> dict[str, Any]:
        """The config.json of this model: Hugging Face keys, `extra`, and a "glm5sdk" table for settings of our own.

        The table is absent while those settings have their defaults. `from_dict` of the result equals this config.
        """
        return config_json.dict_from_config(self)

    def replace(self, **changes: Any) -> Glm5Config:
        """A checked copy with some fields changed. Per-layer lists are not resized: set them to None to derive them."""
        return dataclasses.replace(self, **changes)

    def hf_compat(self) -> Glm5Config:
        """A copy that computes what transformers computes: its latent norms keep the class default eps of 1e-6."""
        return self.replace(latent_norm_eps=1e-6)

    # Attention

    @property
    def qk_head_dim(self) -> int:
        """Width of a query head: nope part, then rope part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_width(self) -> int:
        """Width of a KV cache row: the normed latent, then the one rotated key part that all heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Scale of attention scores: qk_head_dim ** -0.5, also in the absorbed form, times YaRN's factor if any."""
        scale = float(self.qk_head_dim**-0.5)
        return scale * self.rope_scaling.softmax_factor if self.rope_scaling is not None else scale

    @property
    def rope_cos_sin_factor(self) -> float:
        """The number that multiplies cos and sin: 1 without YaRN."""
        return self.rope_scaling.cos_sin_factor if self.rope_scaling is not None else 1.0

    def inverse_frequencies(self) -> tuple[float, ...]:
        """Radians per position of each rotary pair, qk_rope_head_dim / 2 doubles; the indexer uses the same."""
        return inverse_frequencies(self.qk_rope_head_dim, self.rope_theta, self.rope_scaling)

    # Sparse selection

    @cached_property
    def indexer_schedule(self) -> tuple[str, ...]:
        """One of "full" and "shared" per decoder layer, then the MTP layer's if there is one; empty: no indexers."""
        if self.sparse_pattern != "indexer":
            return ()
        types = resolve_indexer_types(
            self.num_hidden_layers,
            self.indexer_types,
            self.index_topk_pattern,
            self.index_topk_freq,
            self.index_skip_topk_offset,
        )
        return types + (FULL,) * self.num_nextn_predict_layers

    @cached_property
    def indexer_sources(self) -> tuple[int, ...]:
        """For each layer (MTP last), the layer whose selection it attends with; empty without indexers."""
        return indexer_sources(self.indexer_schedule)

    def has_indexer(self, layer: int) -> bool:
        """Whether this layer owns indexer weights; a shared layer reuses the selection of `indexer_sources[layer]`."""
        return bool(self.indexer_schedule) and self.indexer_schedule[layer] == FULL

    @property
    def num_selected_keys(self) -> int:
        """K, the width of a selection: index_topk, or for window_stride the window and all strided positions."""
        if self.sparse_pattern == "indexer":
            return self.index_topk
        return self.sparse_window + -(-self.max_position_embeddings // self.sparse_stride)

    # Layers and experts

    @property
    def num_layers(self) -> int:
        """Decoder layers and the MTP layer, if any."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    def is_moe(self, layer: int) -> bool:
        """Whether this layer routes to experts; the MTP layer always does."""
        if layer >= self.num_hidden_layers:
            return True
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types[layer] == "sparse"
        return layer >= self.first_k_dense_replace

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared expert; 0 when there is none."""
        return self.moe_intermediate_size * self.n_shared_experts

    @property
    def has_router_bias(self) -> bool:
        """Whether sparse layers store e_score_correction_bias."""
        return self.topk_method == "noaux_tc"
