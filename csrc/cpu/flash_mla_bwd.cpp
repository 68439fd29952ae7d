#include "glm5/ops/flash_mla_bwd.h"

#include "cpu/rows/attention_backward.h"

GLM5_KERNEL(flash_mla_bwd,
            (const Context& ctx, const TensorView& grad_out, const TensorView& grad_lse, const TensorView& q,
             const TensorView& kv_cache, const TensorView& block_table, const TensorView& request_ids,
             const TensorView& kv_lens, double scale, int64_t v_dim, const char* format, const TensorView& grad_q,
             const TensorView& grad_kv),
            (ctx, grad_out, grad_lse, q, kv_cache, block_table, request_ids, kv_lens, scale, v_dim, format, grad_q,
             grad_kv)) {
  (void)ctx;
  constexpr const char* kName = "flash_mla_bwd";
  if (is_byte_format(kName, format, "fp8_ds_mla")) fail("%s: format is %s, needs plain", kName, format);
  const PageTable table(block_table, kv_cache.dim(0), kv_cache.dim(1));
  const int64_t most = check_lengths(kName, table, request_ids, kv_lens, table.capacity());
  const AttentionGradients arguments{grad_out, grad_lse, q,    kv_cache, static_cast<float>(scale),
                                     v_dim,    1,        most, grad_q,   grad_kv};
  const int32_t *lengths = kv_lens.data<int32_t>(), *requests = request_ids.data<int32_t>();
  for_float_type("flash_mla_bwd: q", q.dtype(), [&](auto type) {
    attention_backward<decltype(type)>(arguments, [&](int64_t unit, int64_t* slots) {
      const int32_t request = requests[unit];
      const int64_t n = request < 0 ? 0 : lengths[unit];
      for (int64_t k = 0; k < n; ++k) slots[k] = table.slot(request, k);
      return n;
    });
  });
}
