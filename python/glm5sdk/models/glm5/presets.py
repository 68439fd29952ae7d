"""Configs by name: the published models, a demo model, and two small ones with the options of older descriptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5.config import Glm5Config


def preset(name: str, **changes: Any) -> Glm5Config:
    """The config called `name`, with some fields changed.

    Raises:
        ContractError: no such preset, or the changes contradict the rest.
    """
    if name not in _PRESETS:
        raise ContractError(f"preset: name is {name!r}, needs one of {', '.join(preset_names())}")
    config = _PRESETS[name]()
    return config.replace(**changes) if changes else config


def preset_names() -> list[str]:
    """The names that `preset` knows."""
    return list(_PRESETS)


def _glm5() -> Glm5Config:
    """GLM-5 and GLM-5.1: 754B parameters with MTP, 41B of them active; an indexer on every layer; 202,752 tokens."""
    return Glm5Config(eos_token_id=(154820, 154827, 154829), pad_token_id=154820)


def _glm52() -> Glm5Config:
    """GLM-5.2 and GLM-5.3: GLM-5 with a shared indexer on 57 of 78 layers and one million tokens of plain rope."""
    return _glm5().replace(
        rope_theta=8_000_000.0,
        max_position_embeddings=1_048_576,
        moe_router_dtype="float32",
        index_topk_freq=4,
        index_skip_topk_offset=3,
        index_share_for_mtp_iteration=True,
    )


def _tiny() -> Glm5Config:
    """The demo model: every part of GLM-5 at a size that trains on a laptop in minutes (4.7M parameters)."""
    return Glm5Config(
        vocab_size=2048,
        hidden_size=192,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=48,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        # With few index heads ReLU leaves many scores at exactly 0, and the selection among ties is arbitrary.
        index_n_heads=16,
        index_head_dim=32,
        index_topk=32,
        rope_theta=10_000.0,
        max_position_embeddings=1024,
        dtype="float32",
    )


def _seed_a() -> Glm5Config:
    """A small model with the first founding description's sparse attention: 32 keys per query.

    An option, not GLM-5, which selects 2048. That description selects per head; here, as in GLM-5, one selection
    serves all heads. Its totals (750B parameters, 120B active) are not GLM-5's either and are only echoed by the
    share of experts that are active: 4 of 24.
    """
    return Glm5Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        q_lora_rank=256,
        kv_lora_rank=128,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=64,
        first_k_dense_replace=1,
        n_routed_experts=24,
        num_experts_per_tok=4,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=32,
        max_position_embeddings=8192,
        num_nextn_predict_layers=0,
    )


def _seed_b() -> Glm5Config:
    """A small model with the second founding description's shape: 24 layers, 16 experts, top-2 of a softmax router
    without bias or shared expert, and attention to the last 512 keys and every 64th earlier one, without an indexer.

    An option, not GLM-5, which routes by a biased sigmoid over 256 experts and selects keys with a learned indexer.
    """
    return Glm5Config(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=24,
        num_attention_heads=4,
        q_lora_rank=128,
        kv_lora_rank=64,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=64,
        first_k_dense_replace=0,
        n_routed_experts=16,
        n_shared_experts=0,
        num_experts_per_tok=2,
        scoring_func="softmax",
        topk_method="greedy",
        routed_scaling_factor=1.0,
        index_n_heads=16,
        index_head_dim=32,
        sparse_pattern="window_stride",
        sparse_window=512,
        sparse_stride=64,
        max_position_embeddings=8192,
        num_nextn_predict_layers=0,
    )


_PRESETS: dict[str, Callable[[], Glm5Config]] = {
    "glm-5": _glm5,
    "glm-5.2": _glm52,
    "tiny": _tiny,
    "seed-a": _seed_a,
    "seed-b": _seed_b,
}
