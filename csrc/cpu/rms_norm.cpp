#include "glm5/ops/rms_norm.h"

#include "cpu/kernel.h"
#include "cpu/rows/norm.h"

GLM5_KERNEL(rms_norm,
            (const Context& ctx, const TensorView& x, const TensorView& weight, double eps, const TensorView& y),
            (ctx, x, weight, eps, y)) {
  (void)ctx;
  for_float_type("rms_norm: x", x.dtype(), [&](auto type) {
    using T = decltype(type);
    const int64_t n = x.dim(-1);
    const T *from = x.data<T>(), *scale = weight.data<T>();
    T* to = y.out<T>();
    parallel_for(x.rows(), rows_per_range(n), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        rms_norm_row(from + row * n, scale, n, static_cast<float>(eps), to + row * n);
      }
    });
  });
}
