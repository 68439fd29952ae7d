#include "glm5/ops/grouped_gemm.h"

#include "cpu/grouped_tile.h"
#include "cpu/kernel.h"
#include "cpu/rows/routing.h"

GLM5_KERNEL(grouped_gemm,
            (const Context& ctx, const TensorView& x, const TensorView& w, const TensorView& offsets,
             const TensorView& y),
            (ctx, x, w, offsets, y)) {
  (void)ctx;
  const int64_t rows = x.dim(0), k = x.dim(1), experts = w.dim(0), outs = w.dim(1);
  const int32_t* bounds = offsets.data<int32_t>();
  check_offsets("grouped_gemm", bounds, experts, rows);
  for_float_type("grouped_gemm: x", x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *xs = x.data<T>(), *ws = w.data<T>();
    T* to = y.out<T>();
    grouped_gemm_tiles(
        bounds, experts, outs, k, kTileOuts, [=](int64_t r) { return xs + r * k; },
        [=](int64_t e, int64_t o) { return ws + (e * outs + o) * k; },
        [=](int64_t r, int64_t o, const float* values, int64_t n) {
          for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
            store(to + r * outs + o + i, load(values + i, lanes), lanes);
          });
        });
    const int64_t used = bounds[experts] * outs;
    std::memset(static_cast<void*>(to + used), 0, (rows * outs - used) * sizeof(T));
  });
}
