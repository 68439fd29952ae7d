#include "glm5/ops/fused_add_rms_norm.h"

#include "cpu/kernel.h"
#include "cpu/rows/norm.h"

GLM5_KERNEL(fused_add_rms_norm,
            (const Context& ctx, const TensorView& x, const TensorView& residual, const TensorView& weight, double eps,
             const TensorView& y, const TensorView& residual_out),
            (ctx, x, residual, weight, eps, y, residual_out)) {
  (void)ctx;
  for_float_type("fused_add_rms_norm: x", x.dtype(), [&](auto type) {
    using T = decltype(type);
    const int64_t n = x.dim(-1);
    const T *from = x.data<T>(), *stream = residual.data<T>(), *scale = weight.data<T>();
    T *to = y.out<T>(), *sum = residual_out.out<T>();
    parallel_for(x.rows(), rows_per_range(n), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        add_row(from + row * n, stream + row * n, n, sum + row * n);
        rms_norm_row(sum + row * n, scale, n, static_cast<float>(eps), to + row * n);
      }
    });
  });
}
