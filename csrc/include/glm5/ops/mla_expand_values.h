#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// y[t, h * Dv + v] = sum_c out[t, h, c] * w_uv[h, v, c]: a linear of its own for each head, rounded once.
// out a[T, H, C], w_uv a[H, Dv, C], y a[T, H * Dv].
void mla_expand_values(const Context& ctx, const TensorView& out, const TensorView& w_uv, const TensorView& y);

}  // namespace glm5
