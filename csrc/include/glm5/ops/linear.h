#pragma once

#include <optional>

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// y = x w^T + bias: x a[T, N], w a[O, N], bias a[O] or absent, y a[T, O] or f32[T, O].
void linear(const Context& ctx, const TensorView& x, const TensorView& w, const std::optional<TensorView>& bias,
            const TensorView& y);

}  // namespace glm5
