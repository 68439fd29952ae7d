#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// z = x + y, rounded once: all a[...] of one shape.
void add(const Context& ctx, const TensorView& x, const TensorView& y, const TensorView& z);

}  // namespace glm5
