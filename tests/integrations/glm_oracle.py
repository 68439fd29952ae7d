"""Small GlmMoeDsaForCausalLM models whose rows choose keys without ties, plain and accelerated side by side."""

from __future__ import annotations

import copy
import inspect
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

# What the installed version calls a model's cache; the other name is an error or a warning there.
CACHE = next(n for n in ("cache", "past_key_values") if n in inspect.signature(GlmMoeDsaForCausalLM.forward).parameters)

SMALL: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, moe_intermediate_size=24, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2,
    kv_lora_rank=20, q_lora_rank=24, qk_rope_head_dim=8, v_head_dim=12, qk_nope_head_dim=12, n_group=1, topk_group=1,
    index_topk=8, index_n_heads=16, index_head_dim=16, first_k_dense_replace=1, max_position_embeddings=512,
    bos_token_id=None, eos_token_id=[3, 5], pad_token_id=0, routed_scaling_factor=2.5, norm_topk_prob=True,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)  # fmt: skip


def make_model(seed: int = 0, attn: str = "sdpa", **changes: Any) -> GlmMoeDsaForCausalLM:
    """Random, logits of scale about 1, norms away from 1, a router bias near 7 as trained ones have."""
    config = GlmMoeDsaConfig(**{**copy.deepcopy(SMALL), **changes})
    config._attn_implementation = attn
    torch.manual_seed(seed)
    model = GlmMoeDsaForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
            else:
                p.normal_(0.0, 1.0 / p.shape[-1] ** 0.5)
        model.model.embed_tokens.weight.normal_(0.0, 1.0)
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.copy_(7.0 + 0.01 * torch.randn(b.shape))
    return model


def with_cache(cache: Any) -> dict[str, Any]:
    """The argument by which a model goes on with this cache."""
    return {CACHE: cache}


def cache_of(outputs: Any) -> Any:
    """The cache that a model's outputs carry."""
    return outputs[CACHE]


def ids_of(batch: int, length: int, seed: int = 1, vocab: int = 96) -> torch.Tensor:
    """Token ids that are no stop or padding token."""
    return torch.randint(6, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(pads: list[int], length: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, attention mask), row b beginning with pads[b] pads."""
    ids = ids_of(len(pads), length, seed)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad], mask[row, :pad] = 0, 0
    return ids, mask
