#include "glm5/ops/rms_norm_bwd.h"

#include "cpu/rows/norm_backward.h"

GLM5_KERNEL(rms_norm_bwd,
            (const Context& ctx, const TensorView& grad_y, const TensorView& x, const TensorView& weight, double eps,
             const TensorView& grad_x, const TensorView& grad_weight),
            (ctx, grad_y, x, weight, eps, grad_x, grad_weight)) {
  (void)ctx;
  for_float_type("rms_norm_bwd: x", x.dtype(), [&](auto type) {
    using T = decltype(type);
    const int64_t n = x.dim(-1);
    const T* from = x.data<T>();
    T* to = grad_x.out<T>();
    rms_norm_backward<T>(
        x.rows(), n, static_cast<float>(eps), grad_y.data<T>(), weight.data<T>(), nullptr,
        [=](int64_t t, T*) { return from + t * n; },
        [=](int64_t t, int64_t i, auto lanes) __attribute__((always_inline)) { return load(from + t * n + i, lanes); },
        [=](int64_t t, int64_t i, f32v dx, auto lanes)
            __attribute__((always_inline)) { store(to + t * n + i, dx, lanes); },
        grad_weight.out<T>());
  });
}
