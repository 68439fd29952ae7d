# One line per native op: csrc/cpu/<op>.cpp is its kernel, bindings/<op>.cpp its Python face.
set(GLM5_OPS
  add
  cache_index_keys
  concat_and_cache_mla
  fused_add_rms_norm
  grouped_gemm
  layer_norm
  linear
  mla_expand_values
  moe_experts
  moe_gate
  moe_permute
  moe_unpermute
  rms_norm
  rope
  silu_and_mul
)
