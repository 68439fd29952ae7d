#include "glm5/ops/topk_indexer.h"

#include "cpu/rows/topk.h"

GLM5_KERNEL(topk_indexer,
            (const Context& ctx, const TensorView& iq, const TensorView& iw, const TensorView& index_cache,
             const TensorView& block_table, const TensorView& request_ids, const TensorView& kv_lens, int64_t topk,
             int64_t max_kv_len, const char* format, int64_t workspace_bytes, const TensorView& indices),
            (ctx, iq, iw, index_cache, block_table, request_ids, kv_lens, topk, max_kv_len, format, workspace_bytes,
             indices)) {
  (void)ctx;
  select_topk("topk_indexer", "topk_indexer: iq", iq, iw, index_cache, block_table, request_ids, kv_lens, topk,
              max_kv_len, format, workspace_bytes, indices, nullptr);
}
