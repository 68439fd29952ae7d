#include "glm5/ops/rope.h"

#include "cpu/kernel.h"
#include "cpu/rows/rope.h"
#include "glm5/paged.h"

GLM5_KERNEL(rope,
            (const Context& ctx, const TensorView& x, const TensorView& positions, const TensorView& cos_sin,
             bool interleaved, const TensorView& y),
            (ctx, x, positions, cos_sin, interleaved, y)) {
  (void)ctx;
  const int64_t tokens = x.dim(0), heads = x.dim(1), r = x.dim(2);
  const int64_t* places = positions.data<int64_t>();
  const float* table = cos_sin.data<float>();
  if (r % 2 != 0) fail("rope: R is %lld, needs an even size: rope rotates pairs", static_cast<long long>(r));
  check_range("rope", "positions", places, tokens, 0, cos_sin.dim(0) - 1);
  for_float_type("rope: x", x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* from = x.data<T>();
    T* to = y.out<T>();
    parallel_for(tokens, rows_per_range(heads * r), [&](int64_t begin, int64_t end) {
      Scratch scratch;
      float *c = scratch.take<float>(r), *s = scratch.take<float>(r);
      for (int64_t t = begin; t < end; ++t) {
        rope_factors(table + places[t] * r, r, interleaved, c, s);
        for (int64_t row = t * heads; row < (t + 1) * heads; ++row) {
          rope_row(from + row * r, r, interleaved, c, s, to + row * r);
        }
      }
    });
  });
}
