# One line per native op: csrc/cpu/<op>.cpp is its kernel, bindings/<op>.cpp its Python face.
set(GLM5_OPS
  add
  fused_add_rms_norm
  layer_norm
  linear
  moe_gate
  rms_norm
  silu_and_mul
)
