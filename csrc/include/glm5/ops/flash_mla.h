#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// sparse_flash_attention over the first kv_lens i32[T] keys of each token's request: the same bits as given all their
// positions.
void flash_mla(const Context& ctx, const TensorView& q, const TensorView& kv_cache, const TensorView& block_table,
               const TensorView& request_ids, const TensorView& kv_lens, double scale, int64_t v_dim,
               const char* format, const TensorView& out, const TensorView& lse);

}  // namespace glm5
