#include "glm5/ops/silu_and_mul.h"

#include "cpu/kernel.h"
#include "cpu/rows/gated.h"

GLM5_KERNEL(silu_and_mul,
            (const Context& ctx, const TensorView& x, const std::optional<double>& limit, const TensorView& y),
            (ctx, x, limit, y)) {
  (void)ctx;
  for_float_type("silu_and_mul: x", x.dtype(), [&](auto type) {
    using T = decltype(type);
    const int64_t n = y.dim(-1);
    const float most = limit_or_none(limit);
    const T* from = x.data<T>();
    T* to = y.out<T>();
    parallel_for(x.rows(), rows_per_range(n), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T *gate = from + row * 2 * n, *up = gate + n;
        for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
          store(to + row * n + i, gated<T>(load(gate + i, lanes), load(up + i, lanes), most), lanes);
        });
      }
    });
  });
}
