# One line per native op: csrc/cpu/<op>.cpp is its kernel, bindings/<op>.cpp its Python face.
set(GLM5_OPS
  add
  cache_index_keys
  concat_and_cache_mla
  dequantize
  flash_mla
  fused_add_rms_norm
  grouped_gemm
  hadamard
  layer_norm
  linear
  linear_cross_entropy
  linear_entropy
  linear_quantised
  mla_expand_values
  moe_experts
  moe_gate
  moe_permute
  moe_unpermute
  quantize_per_group
  quantize_per_token
  rms_norm
  rope
  sample
  silu_and_mul
  sparse_flash_attention
  topk_indexer
  topk_indexer_with_scores
  window_stride_indices
)

# Which of them also have kernels for 8-bit dot products, for bf16 dot products and for matrix tiles.
set(GLM5_VNNI_OPS
  linear_quantised
)
set(GLM5_BF16_OPS
  grouped_gemm
  linear
  linear_cross_entropy
  linear_entropy
  mla_expand_values
  moe_experts
)
set(GLM5_AMX_OPS ${GLM5_BF16_OPS} ${GLM5_VNNI_OPS})
