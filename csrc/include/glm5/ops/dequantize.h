#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// y = q * scale: q i8 or e4m3 [T, N], scale f32[T, 1] or f32[T, ceil(N / 128)], y f32, bf16 or f16 [T, N].
void dequantize(const Context& ctx, const TensorView& q, const TensorView& scale, const TensorView& y);

}  // namespace glm5
