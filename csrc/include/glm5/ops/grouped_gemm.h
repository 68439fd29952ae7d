#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// y[r] = w[e] x[r] for rows offsets[e] <= r < offsets[e + 1]: x a[M, N], w a[E, O, N], offsets i32[E + 1], y a[M, O].
// Rows from offsets[E] on become 0.
void grouped_gemm(const Context& ctx, const TensorView& x, const TensorView& w, const TensorView& offsets,
                  const TensorView& y);

}  // namespace glm5
