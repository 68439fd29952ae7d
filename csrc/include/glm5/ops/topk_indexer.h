#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// The topk best keys of each token by score = sum over heads of iw * relu(iq . key): score descending, then position
// ascending; NaN is -inf, -0 is +0.
//   iq a[T, Hi, Di]; iw f32[T, Hi]; index_cache a[P, S, Di] ("plain") or u8[P, S * (Di + 4)] ("fp8")
//   block_table i32[B, M]; request_ids i32[T], -1 = padding; kv_lens i32[T], at most max_kv_len
//   workspace_bytes: memory for scores; the result does not depend on it
//   indices i32[T, 1, K]: logical positions ascending, then -1
void topk_indexer(const Context& ctx, const TensorView& iq, const TensorView& iw, const TensorView& index_cache,
                  const TensorView& block_table, const TensorView& request_ids, const TensorView& kv_lens, int64_t topk,
                  int64_t max_kv_len, const char* format, int64_t workspace_bytes, const TensorView& indices);

}  // namespace glm5
