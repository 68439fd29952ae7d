#include "glm5/ops/add.h"

#include "cpu/kernel.h"
#include "cpu/rows/norm.h"

GLM5_KERNEL(add, (const Context& ctx, const TensorView& x, const TensorView& y, const TensorView& z), (ctx, x, y, z)) {
  (void)ctx;
  for_float_type("add: x", x.dtype(), [&](auto type) {
    using T = decltype(type);
    const T *left = x.data<T>(), *right = y.data<T>();
    T* to = z.out<T>();
    parallel_for(x.numel(), rows_per_range(1),
                 [&](int64_t begin, int64_t end) { add_row(left + begin, right + begin, end - begin, to + begin); });
  });
}
