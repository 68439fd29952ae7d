#pragma once

#include <optional>

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// y = silu(gate) * up by rows, gate and up the halves of x: x a[T, 2*I], y a[T, I].
void silu_and_mul(const Context& ctx, const TensorView& x, const std::optional<double>& limit, const TensorView& y);

}  // namespace glm5
