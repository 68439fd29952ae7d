#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// residual_out = x + residual, y = rms_norm(residual_out): all a[T, N], weight a[N].
void fused_add_rms_norm(const Context& ctx, const TensorView& x, const TensorView& residual, const TensorView& weight,
                        double eps, const TensorView& y, const TensorView& residual_out);

}  // namespace glm5
