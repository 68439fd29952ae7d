#include "glm5/ops/flash_mla.h"

#include "cpu/rows/latent_attention.h"

GLM5_KERNEL(flash_mla,
            (const Context& ctx, const TensorView& q, const TensorView& kv_cache, const TensorView& block_table,
             const TensorView& request_ids, const TensorView& kv_lens, double scale, int64_t v_dim, const char* format,
             const TensorView& out, const TensorView& lse),
            (ctx, q, kv_cache, block_table, request_ids, kv_lens, scale, v_dim, format, out, lse)) {
  (void)ctx;
  const bool bytes = is_byte_format("flash_mla", format, "fp8_ds_mla");
  const PageTable table(block_table, kv_cache.dim(0), kv_cache.dim(1));
  const int64_t longest = check_lengths("flash_mla", table, request_ids, kv_lens, table.capacity());
  const AttentionArguments arguments{q,     kv_cache, request_ids, table, static_cast<float>(scale),
                                     v_dim, bytes,    longest,     out,   lse};
  latent_attention("flash_mla: q", arguments, AllKeys{kv_lens.data<int32_t>()});
}
