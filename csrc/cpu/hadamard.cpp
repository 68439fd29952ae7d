#include "glm5/ops/hadamard.h"

#include "cpu/kernel.h"
#include "cpu/vec.h"

namespace glm5::GLM5_LEVEL_NS {
namespace {

// One step: pairs `stride` apart become their sum and difference.
GLM5_INLINE void butterflies(float* row, int64_t n, int64_t stride) {
  for (int64_t first = 0; first < n; first += 2 * stride) {
    float *low = row + first, *high = low + stride;
    if (stride >= kLanes) {
      for (int64_t i = 0; i < stride; i += kLanes) {
        const f32v a = load(low + i), b = load(high + i);
        store(low + i, a + b);
        store(high + i, a - b);
      }
    } else {
      for (int64_t i = 0; i < stride; ++i) {
        const float a = low[i], b = high[i];
        low[i] = a + b;
        high[i] = a - b;
      }
    }
  }
}

template <class T>
void hadamard_typed(const TensorView& x, const TensorView& y) {
  const int64_t n = x.dim(1);
  const T* from = x.data<T>();
  T* to = y.out<T>();
  const f32v scale = broadcast(static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(n))));
  parallel_for(x.dim(0), rows_per_range(8 * n), [=](int64_t begin, int64_t end) {
    Scratch scratch;
    float* row = scratch.take<float>(n);
    for (int64_t t = begin; t < end; ++t) {
      for_lanes(n, [&](int64_t i, auto lanes)
                       __attribute__((always_inline)) { store(row + i, load(from + t * n + i, lanes), lanes); });
      for (int64_t stride = 1; stride < n; stride *= 2) butterflies(row, n, stride);
      for_lanes(n, [&](int64_t i, auto lanes)
                       __attribute__((always_inline)) { store(to + t * n + i, load(row + i, lanes) * scale, lanes); });
    }
  });
}

}  // namespace
}  // namespace glm5::GLM5_LEVEL_NS

GLM5_KERNEL(hadamard, (const Context& ctx, const TensorView& x, const TensorView& y), (ctx, x, y)) {
  (void)ctx;
  for_float_type("hadamard: x", x.dtype(), [&](auto type) { hadamard_typed<decltype(type)>(x, y); });
}
