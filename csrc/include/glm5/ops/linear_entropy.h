#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// entropy of softmax(hidden lm_head^T) by rows, logits in f32: hidden a[T, N], lm_head a[V, N], entropy f32[T].
void linear_entropy(const Context& ctx, const TensorView& hidden, const TensorView& lm_head, const TensorView& entropy);

}  // namespace glm5
