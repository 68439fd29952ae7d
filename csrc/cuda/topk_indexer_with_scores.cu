// The indexer's selection with the scores of what it chose; kernels in topk/.
#include "cuda/topk/select.cuh"

#if !defined(__CUDACC_RTC__)

#include "glm5/ops/topk_indexer_with_scores.h"

namespace glm5 {

void topk_indexer_with_scores(const Context& ctx, const TensorView& iq, const TensorView& iw,
                              const TensorView& index_cache, const TensorView& block_table,
                              const TensorView& request_ids, const TensorView& kv_lens, int64_t topk,
                              int64_t max_kv_len, const char* format, int64_t workspace_bytes,
                              const TensorView& indices, const TensorView& scores) {
  (void)workspace_bytes;  // scores never leave shared memory
  cuda::select_topk(ctx, "topk_indexer_with_scores", "topk_indexer_with_scores: iq", iq, iw, index_cache, block_table,
                    request_ids, kv_lens, topk, max_kv_len, format, indices, scores.out<float>());
}

}  // namespace glm5

#endif
