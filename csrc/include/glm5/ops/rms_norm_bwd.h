#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// Gradients of rms_norm given that of y: grad_y, x and grad_x a[T, N], weight and grad_weight a[N]; each rounded once,
// the weight's summed over rows in blocks ascending, whatever the number of threads.
void rms_norm_bwd(const Context& ctx, const TensorView& grad_y, const TensorView& x, const TensorView& weight,
                  double eps, const TensorView& grad_x, const TensorView& grad_weight);

}  // namespace glm5
