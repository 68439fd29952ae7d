#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// out[t, h] = softmax(scale * q[t, h] . keys) values over the keys that indices select from the token's request;
// lse is the natural logarithm of the sum of exp(score).
//   q a[T, H, C + R]; kv_cache a[P, S, C + R] ("plain") or u8[P, S, bytes of a row] ("fp8_ds_mla"), its first C columns
//   (v_dim) are the values; block_table i32[B, M]; request_ids i32[T], -1 = padding
//   indices i32[T, 1 or H, K]: logical positions, strictly ascending, then -1
//   out a[T, H, C], lse f32[T, H]; a token without keys gets 0 and -inf
void sparse_flash_attention(const Context& ctx, const TensorView& q, const TensorView& kv_cache,
                            const TensorView& block_table, const TensorView& request_ids, const TensorView& indices,
                            double scale, int64_t v_dim, const char* format, const TensorView& out,
                            const TensorView& lse);

}  // namespace glm5
