#include "glm5/ops/cache_index_keys.h"

#include "cpu/kernel.h"
#include "cpu/rows/cache.h"
#include "glm5/paged.h"

GLM5_KERNEL(cache_index_keys,
            (const Context& ctx, const TensorView& rows, const TensorView& index_cache, const TensorView& slots,
             const char* format),
            (ctx, rows, index_cache, slots, format)) {
  (void)ctx;
  const bool bytes = is_byte_format("cache_index_keys", format, "fp8");
  const int64_t n = rows.dim(1), tokens = rows.dim(0);
  const int64_t size = bytes ? index_cache.dim(1) / (n + 4) : index_cache.dim(1);
  const int64_t* to = slots.data<int64_t>();
  check_slots("cache_index_keys", to, tokens, index_cache.dim(0) * size);
  for_float_type("cache_index_keys: rows", rows.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* from = rows.data<T>();
    T* plain = bytes ? nullptr : index_cache.out<T>();
    uint8_t* coded = bytes ? index_cache.out<uint8_t>() : nullptr;
    parallel_for(tokens, rows_per_range(n), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        if (to[t] < 0) continue;
        if (bytes) {
          write_fp8_index_row(from + t * n, n, coded + to[t] / size * size * (n + 4), size, to[t] % size);
        } else {
          std::memcpy(plain + to[t] * n, from + t * n, static_cast<size_t>(n) * sizeof(T));
        }
      }
    });
  });
}
