#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// q = x / scale to nearest even, one scale per row: x a[T, N], q i8 or e4m3 [T, N], scale f32[T, 1].
void quantize_per_token(const Context& ctx, const TensorView& x, const TensorView& q, const TensorView& scale);

}  // namespace glm5
