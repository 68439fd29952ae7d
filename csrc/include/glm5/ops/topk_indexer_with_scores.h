#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// topk_indexer that also returns the scores f32[T, 1, K] of what it chose, -inf where absent.
void topk_indexer_with_scores(const Context& ctx, const TensorView& iq, const TensorView& iw,
                              const TensorView& index_cache, const TensorView& block_table,
                              const TensorView& request_ids, const TensorView& kv_lens, int64_t topk,
                              int64_t max_kv_len, const char* format, int64_t workspace_bytes,
                              const TensorView& indices, const TensorView& scores);

}  // namespace glm5
