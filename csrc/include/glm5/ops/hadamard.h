#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// y = x H / sqrt(N), H the Sylvester-Hadamard matrix: x a[T, N], N a power of two, y a[T, N].
void hadamard(const Context& ctx, const TensorView& x, const TensorView& y);

}  // namespace glm5
