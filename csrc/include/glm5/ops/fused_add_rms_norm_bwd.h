#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// Gradients of fused_add_rms_norm given those of y and residual_out, all a[T, N] but weight and grad_weight a[N].
// grad_x and grad_residual are equal. Rounding and sums as in rms_norm_bwd.
void fused_add_rms_norm_bwd(const Context& ctx, const TensorView& grad_y, const TensorView& grad_residual_out,
                            const TensorView& x, const TensorView& residual, const TensorView& weight, double eps,
                            const TensorView& grad_x, const TensorView& grad_residual, const TensorView& grad_weight);

}  // namespace glm5
