#include "glm5/ops/layer_norm.h"

#include "cpu/kernel.h"
#include "cpu/rows/norm.h"

GLM5_KERNEL(layer_norm,
            (const Context& ctx, const TensorView& x, const TensorView& weight, const TensorView& bias, double eps,
             const TensorView& y),
            (ctx, x, weight, bias, eps, y)) {
  (void)ctx;
  for_float_type("layer_norm: x", x.dtype(), [&](auto type) {
    using T = decltype(type);
    const int64_t n = x.dim(-1);
    const T *from = x.data<T>(), *scale = weight.data<T>(), *shift = bias.data<T>();
    T* to = y.out<T>();
    parallel_for(x.rows(), rows_per_range(n), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        layer_norm_row(from + row * n, scale, shift, n, static_cast<float>(eps), to + row * n);
      }
    });
  });
}
