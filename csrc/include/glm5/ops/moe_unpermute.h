#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// y[t] = sum over t's rows, in the order they stand, of weight * row: rows a[M, N], row_ids i32[M] (flat slot t*A+j of
// each row, -1 = skip), weights f32[T, A], y a[T, N].
void moe_unpermute(const Context& ctx, const TensorView& rows, const TensorView& row_ids, const TensorView& weights,
                   const TensorView& y);

}  // namespace glm5
