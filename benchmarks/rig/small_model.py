"""The model of the whole-model table: every part of GLM-5 at a size that a small machine runs, random weights."""

from __future__ import annotations

from pathlib import Path

import torch

from glm5sdk.models.glm5 import Glm5Config, Glm5ForCausalLM

CONFIG = Glm5Config(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=3072,
    moe_intermediate_size=512,
    num_hidden_layers=8,
    num_attention_heads=16,
    q_lora_rank=512,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    first_k_dense_replace=1,
    n_routed_experts=32,
    n_shared_experts=1,
    num_experts_per_tok=4,
    index_n_heads=8,
    index_head_dim=128,
    index_topk=512,
    num_nextn_predict_layers=0,
    max_position_embeddings=65536,
    eos_token_id=(1,),
    pad_token_id=0,
)


def make_checkpoint(path: Path, config: Glm5Config = CONFIG) -> None:
    """Write such a model in bfloat16 in Hugging Face's layout, unless it is there; CONFIG's is about a gigabyte.

    Weights have the spread at which a layer keeps the size of its input, so that programs can be compared by their
    logits: with the usual 0.02 the model would hardly do anything. What a layer adds is smaller, by the root of their
    number: otherwise one expert chosen otherwise, as a rounding decides, would change everything after it.
    """
    if (path / "config.json").exists():
        return
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Glm5ForCausalLM(config)
    model.to_empty(device="cpu").to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                out = "o_proj" in name or "down_proj" in name
                scale = (2 * config.num_hidden_layers) ** -0.5 if out else 1.0
                parameter.normal_(0.0, 1.0 if "embed_tokens" in name else scale * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(7.0 + 0.01 * torch.randn(buffer.shape))
    model.save_pretrained(path)
