#pragma once

#include <optional>

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// y = x w^T + bias for a weight of few bits: x a[T, N], bias a[O] or absent, y a[T, O] or f32[T, O]; values and scales
// are, by the dtype of values,
//   i8 [O, N], f32[O]: w8a8
//   u8 [O, ceil(N / 2)], f32[O, ceil(N / 128)]: w4a8
//   f8_e4m3 [O, N], f32[ceil(O / 128), ceil(N / 128)]: fp8
void linear_quantised(const Context& ctx, const TensorView& x, const TensorView& values, const TensorView& scales,
                      const std::optional<TensorView>& bias, const TensorView& y);

}  // namespace glm5
