#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// y = (x - mean) / sqrt(var + eps) * weight + bias by rows: x, y a[T, N], weight, bias a[N].
void layer_norm(const Context& ctx, const TensorView& x, const TensorView& weight, const TensorView& bias, double eps,
                const TensorView& y);

}  // namespace glm5
