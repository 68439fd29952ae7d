#include "glm5/ops/silu_and_mul_bwd.h"

#include "cpu/kernel.h"
#include "cpu/rows/gated_backward.h"

GLM5_KERNEL(silu_and_mul_bwd,
            (const Context& ctx, const TensorView& grad_y, const TensorView& x, const std::optional<double>& limit,
             const TensorView& grad_x),
            (ctx, grad_y, x, limit, grad_x)) {
  (void)ctx;
  for_float_type("silu_and_mul_bwd: x", x.dtype(), [&](auto type) {
    using T = decltype(type);
    const int64_t n = grad_y.dim(-1);
    const float most = limit_or_none(limit);
    const T *from = x.data<T>(), *grad = grad_y.data<T>();
    T* to = grad_x.out<T>();
    parallel_for(x.rows(), rows_per_range(n), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T *gate = from + row * 2 * n, *up = gate + n;
        T *d_gate = to + row * 2 * n, *d_up = d_gate + n;
        for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
          f32v down_gate, down_up;
          gated_backward(load(grad + row * n + i, lanes), load(gate + i, lanes), load(up + i, lanes), most, down_gate,
                         down_up);
          store(d_gate + i, down_gate, lanes);
          store(d_up + i, down_up, lanes);
        });
      }
    });
  });
}
