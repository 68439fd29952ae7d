#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// The last `window` of each token's kv_lens i32[T] keys and, before them, every multiple of `stride`; when that is more
// than topk, the oldest are left out. indices i32[T, 1, K]: ascending, then -1.
void window_stride_indices(const Context& ctx, const TensorView& kv_lens, int64_t window, int64_t stride, int64_t topk,
                           const TensorView& indices);

}  // namespace glm5
