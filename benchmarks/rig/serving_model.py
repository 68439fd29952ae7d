"""The model of the serving tables: every part of GLM-5 in 113 million random weights, small enough for float32."""

from __future__ import annotations

from glm5sdk.models.glm5 import Glm5Config

CONFIG = Glm5Config(
    vocab_size=16384,
    hidden_size=512,
    intermediate_size=1536,
    moe_intermediate_size=256,
    num_hidden_layers=8,
    num_attention_heads=8,
    q_lora_rank=256,
    kv_lora_rank=256,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
    first_k_dense_replace=1,
    n_routed_experts=32,
    n_shared_experts=1,
    num_experts_per_tok=4,
    # 16 heads: with fewer, random weights give keys the same score of zero, and programs break such ties differently.
    index_n_heads=16,
    index_head_dim=64,
    index_topk=256,
    num_nextn_predict_layers=0,
    max_position_embeddings=8192,
    eos_token_id=(1,),
    pad_token_id=0,
)

QUICK = CONFIG.replace(vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=64,
                       num_hidden_layers=3, n_routed_experts=8)  # fmt: skip
