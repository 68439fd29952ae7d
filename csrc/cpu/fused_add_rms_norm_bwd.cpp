#include "glm5/ops/fused_add_rms_norm_bwd.h"

#include "cpu/rows/norm_backward.h"

GLM5_KERNEL(fused_add_rms_norm_bwd,
            (const Context& ctx, const TensorView& grad_y, const TensorView& grad_residual_out, const TensorView& x,
             const TensorView& residual, const TensorView& weight, double eps, const TensorView& grad_x,
             const TensorView& grad_residual, const TensorView& grad_weight),
            (ctx, grad_y, grad_residual_out, x, residual, weight, eps, grad_x, grad_residual, grad_weight)) {
  (void)ctx;
  for_float_type("fused_add_rms_norm_bwd: x", x.dtype(), [&](auto type) {
    using T = decltype(type);
    const int64_t n = x.dim(-1);
    const T *a = x.data<T>(), *b = residual.data<T>();
    T *to_a = grad_x.out<T>(), *to_b = grad_residual.out<T>();
    rms_norm_backward<T>(
        x.rows(), n, static_cast<float>(eps), grad_y.data<T>(), weight.data<T>(), grad_residual_out.data<T>(),
        [=](int64_t t, T* buffer) {
          add_row(a + t * n, b + t * n, n, buffer);
          return static_cast<const T*>(buffer);
        },
        [=](int64_t t, int64_t i, auto lanes) __attribute__((always_inline)) {
          return round_to<T>(load(a + t * n + i, lanes) + load(b + t * n + i, lanes));
        },
        [=](int64_t t, int64_t i, f32v dx, auto lanes) __attribute__((always_inline)) {
          store(to_a + t * n + i, dx, lanes);
          store(to_b + t * n + i, dx, lanes);
        },
        grad_weight.out<T>());
  });
}
