#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// Gradients of sparse_flash_attention given those of its outputs, grad_out a[T, H, C] and grad_lse f32[T, H]; the other
// arguments are the op's own (indices i32[T, G, K]), the cache plain. grad_q a[T, H, C + R]; grad_kv a[P, S, C + R], 0
// for rows that nothing saw. Sums are in f32, rounded once; the same for any number of threads.
void sparse_flash_attention_bwd(const Context& ctx, const TensorView& grad_out, const TensorView& grad_lse,
                                const TensorView& q, const TensorView& kv_cache, const TensorView& block_table,
                                const TensorView& request_ids, const TensorView& indices, double scale, int64_t v_dim,
                                const char* format, const TensorView& grad_q, const TensorView& grad_kv);

}  // namespace glm5
