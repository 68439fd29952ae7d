#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// q = x / scale to nearest even, one scale per row and 128 columns: x a[T, N], q i8 or e4m3 [T, N],
// scale f32[T, ceil(N / 128)].
void quantize_per_group(const Context& ctx, const TensorView& x, const TensorView& q, const TensorView& scale);

}  // namespace glm5
