#include "glm5/ops/linear.h"

#include "cpu/gemm_tile.h"
#include "cpu/kernel.h"

namespace glm5::GLM5_LEVEL_NS {
namespace {

template <class T, class Y>
void linear_typed(const TensorView& x, const TensorView& w, const std::optional<TensorView>& bias,
                  const TensorView& y) {
  const int64_t k = x.dim(-1), outs = w.dim(0);
  const T *xs = x.data<T>(), *ws = w.data<T>(), *shift = bias ? bias->data<T>() : nullptr;
  Y* to = y.out<Y>();
  gemm(
      x.rows(), outs, k, [=](int64_t r) { return xs + r * k; }, [=](int64_t o) { return ws + o * k; },
      [=](int64_t r, int64_t o, const float* values, int64_t n) {
        for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
          f32v v = load(values + i, lanes);
          if (shift) v = v + load(shift + o + i, lanes);
          store(to + r * outs + o + i, v, lanes);
        });
      });
}

}  // namespace
}  // namespace glm5::GLM5_LEVEL_NS

GLM5_KERNEL(linear,
            (const Context& ctx, const TensorView& x, const TensorView& w, const std::optional<TensorView>& bias,
             const TensorView& y),
            (ctx, x, w, bias, y)) {
  (void)ctx;
  for_float_type("linear: x", x.dtype(), [&](auto type) {
    using T = decltype(type);
    if (y.dtype() == DType::f32) {
      linear_typed<T, float>(x, w, bias, y);
    } else {
      linear_typed<T, T>(x, w, bias, y);
    }
  });
}
