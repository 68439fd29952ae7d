#pragma once

#include <optional>

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// Gradient of silu_and_mul given that of y: grad_y a[T, I], x and grad_x a[T, 2I]; 0 where an input was clamped.
void silu_and_mul_bwd(const Context& ctx, const TensorView& grad_y, const TensorView& x,
                      const std::optional<double>& limit, const TensorView& grad_x);

}  // namespace glm5
