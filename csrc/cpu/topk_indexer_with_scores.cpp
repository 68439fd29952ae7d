#include "glm5/ops/topk_indexer_with_scores.h"

#include "cpu/rows/topk.h"

GLM5_KERNEL(topk_indexer_with_scores,
            (const Context& ctx, const TensorView& iq, const TensorView& iw, const TensorView& index_cache,
             const TensorView& block_table, const TensorView& request_ids, const TensorView& kv_lens, int64_t topk,
             int64_t max_kv_len, const char* format, int64_t workspace_bytes, const TensorView& indices,
             const TensorView& scores),
            (ctx, iq, iw, index_cache, block_table, request_ids, kv_lens, topk, max_kv_len, format, workspace_bytes,
             indices, scores)) {
  (void)ctx;
  select_topk("topk_indexer_with_scores", "topk_indexer_with_scores: iq", iq, iw, index_cache, block_table, request_ids,
              kv_lens, topk, max_kv_len, format, workspace_bytes, indices, &scores);
}
