"""Small random models saved by transformers: the independent oracle of the whole model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

SMALL: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, moe_intermediate_size=24, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2,
    kv_lora_rank=20, q_lora_rank=24, qk_rope_head_dim=8, v_head_dim=12, qk_nope_head_dim=12, n_group=1, topk_group=1,
    index_topk=8, index_n_heads=16, index_head_dim=16, first_k_dense_replace=1, max_position_embeddings=512,
    bos_token_id=None, eos_token_id=[3, 5], pad_token_id=0, routed_scaling_factor=2.5, norm_topk_prob=True,
)  # fmt: skip


def make_oracle(seed: int = 0, twin: bool = False, **changes: Any) -> torch.nn.Module:
    """A random model of either class with logits of scale about 1, norms away from 1 and a router bias near 7."""
    values = SMALL | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}} | changes
    config = (DeepseekV32Config if twin else GlmMoeDsaConfig)(**values)
    torch.manual_seed(seed)
    model = (DeepseekV32ForCausalLM if twin else GlmMoeDsaForCausalLM)(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
            else:
                p.normal_(0.0, 1.0 / p.shape[-1] ** 0.5)
        tied = config.tie_word_embeddings
        model.model.embed_tokens.weight.normal_(0.0, 1.0 / config.hidden_size**0.5 if tied else 1.0)
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.copy_(7.0 + 0.01 * torch.randn(b.shape))
    return model


def save_oracle(path: Path, **kwargs: Any) -> torch.nn.Module:
    """Save a random oracle as a checkpoint and return it."""
    model = make_oracle(**kwargs)
    model.save_pretrained(path)
    return model


def random_ids(batch: int, length: int, seed: int, vocab: int = 96) -> torch.Tensor:
    """Token ids that are no stop or padding token."""
    return torch.randint(6, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))
