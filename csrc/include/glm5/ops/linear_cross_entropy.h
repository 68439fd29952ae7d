#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// lse = log sum exp of the f32 logits hidden lm_head^T, loss = lse - logit of the target: hidden a[T, N], lm_head
// a[V, N], targets i64[T] (-100 = ignored: its loss is 0), loss f32[T], lse f32[T].
void linear_cross_entropy(const Context& ctx, const TensorView& hidden, const TensorView& lm_head,
                          const TensorView& targets, const TensorView& loss, const TensorView& lse);

}  // namespace glm5
