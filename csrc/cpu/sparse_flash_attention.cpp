#include "glm5/ops/sparse_flash_attention.h"

#include "cpu/rows/latent_attention.h"

GLM5_KERNEL(sparse_flash_attention,
            (const Context& ctx, const TensorView& q, const TensorView& kv_cache, const TensorView& block_table,
             const TensorView& request_ids, const TensorView& indices, double scale, int64_t v_dim, const char* format,
             const TensorView& out, const TensorView& lse),
            (ctx, q, kv_cache, block_table, request_ids, indices, scale, v_dim, format, out, lse)) {
  (void)ctx;
  const bool bytes = is_byte_format("sparse_flash_attention", format, "fp8_ds_mla");
  const int64_t heads = q.dim(1), groups = indices.dim(1), k = indices.dim(2);
  if (groups != 1 && groups != heads) {
    fail("sparse_flash_attention: G is %lld, needs 1 or H = %lld: one selection for all heads or one each",
         static_cast<long long>(groups), static_cast<long long>(heads));
  }
  const PageTable table(block_table, kv_cache.dim(0), kv_cache.dim(1));
  check_selections("sparse_flash_attention", table, request_ids, indices);
  const AttentionArguments arguments{q,     kv_cache, request_ids, table, static_cast<float>(scale),
                                     v_dim, bytes,    k,           out,   lse};
  const int32_t* selected = indices.data<int32_t>();
  if (groups == 1) {
    latent_attention("sparse_flash_attention: q", arguments, SelectedKeys<true>{selected, heads, k});
  } else {
    latent_attention("sparse_flash_attention: q", arguments, SelectedKeys<false>{selected, heads, k});
  }
}
