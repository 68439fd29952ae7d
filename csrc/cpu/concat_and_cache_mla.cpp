#include "glm5/ops/concat_and_cache_mla.h"

#include "cpu/kernel.h"
#include "cpu/rows/cache.h"
#include "glm5/paged.h"

GLM5_KERNEL(concat_and_cache_mla,
            (const Context& ctx, const TensorView& rows, const TensorView& kv_cache, const TensorView& slots,
             int64_t v_dim, const char* format),
            (ctx, rows, kv_cache, slots, v_dim, format)) {
  (void)ctx;
  const bool bytes = is_byte_format("concat_and_cache_mla", format, "fp8_ds_mla");
  const int64_t n = rows.dim(1), tokens = rows.dim(0);
  const int64_t* to = slots.data<int64_t>();
  check_slots("concat_and_cache_mla", to, tokens, kv_cache.dim(0) * kv_cache.dim(1));
  for_float_type("concat_and_cache_mla: rows", rows.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* from = rows.data<T>();
    T* plain = bytes ? nullptr : kv_cache.out<T>();
    uint8_t* coded = bytes ? kv_cache.out<uint8_t>() : nullptr;
    const int64_t row_bytes = fp8_kv_row_bytes(v_dim, n - v_dim);
    parallel_for(tokens, rows_per_range(n), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        if (to[t] < 0) continue;
        if (bytes) {
          write_fp8_kv_row(from + t * n, v_dim, n - v_dim, coded + to[t] * row_bytes);
        } else {
          std::memcpy(plain + to[t] * n, from + t * n, static_cast<size_t>(n) * sizeof(T));
        }
      }
    });
  });
}
