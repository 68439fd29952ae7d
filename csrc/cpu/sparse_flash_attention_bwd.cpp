#include "glm5/ops/sparse_flash_attention_bwd.h"

#include "cpu/rows/attention_backward.h"

GLM5_KERNEL(sparse_flash_attention_bwd,
            (const Context& ctx, const TensorView& grad_out, const TensorView& grad_lse, const TensorView& q,
             const TensorView& kv_cache, const TensorView& block_table, const TensorView& request_ids,
             const TensorView& indices, double scale, int64_t v_dim, const char* format, const TensorView& grad_q,
             const TensorView& grad_kv),
            (ctx, grad_out, grad_lse, q, kv_cache, block_table, request_ids, indices, scale, v_dim, format, grad_q,
             grad_kv)) {
  (void)ctx;
  constexpr const char* kName = "sparse_flash_attention_bwd";
  if (is_byte_format(kName, format, "fp8_ds_mla")) fail("%s: format is %s, needs plain", kName, format);
  const int64_t heads = q.dim(1), groups = indices.dim(1), k = indices.dim(2);
  if (groups != 1 && groups != heads) {
    fail("%s: G is %lld, needs 1 or H = %lld: one selection for all heads or one each", kName,
         static_cast<long long>(groups), static_cast<long long>(heads));
  }
  const PageTable table(block_table, kv_cache.dim(0), kv_cache.dim(1));
  check_selections(kName, table, request_ids, indices);
  const AttentionGradients arguments{grad_out, grad_lse, q, kv_cache, static_cast<float>(scale),
                                     v_dim,    groups,   k, grad_q,   grad_kv};
  const int32_t *selected = indices.data<int32_t>(), *requests = request_ids.data<int32_t>();
  for_float_type("sparse_flash_attention_bwd: q", q.dtype(), [&](auto type) {
    attention_backward<decltype(type)>(arguments, [&](int64_t unit, int64_t* slots) {
      const int32_t request = requests[unit / groups], *from = selected + unit * k;
      int64_t n = 0;
      for (; request >= 0 && n < k && from[n] >= 0; ++n) slots[n] = table.slot(request, from[n]);
      return n;
    });
  });
}
