#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// y = x / rms(x) * weight by rows: x, y a[T, N], weight a[N].
void rms_norm(const Context& ctx, const TensorView& x, const TensorView& weight, double eps, const TensorView& y);

}  // namespace glm5
