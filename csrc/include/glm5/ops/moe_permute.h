#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// Rows of x sorted by expert, stable: x a[T, N], ids i32[T, A] (-1 = none) -> rows a[T*A, N], row_ids i32[T*A] (flat
// slot of each sorted row; -1 and a row of 0 past the last), offsets i32[num_experts + 1] (where each expert begins).
void moe_permute(const Context& ctx, const TensorView& x, const TensorView& ids, int64_t num_experts,
                 const TensorView& rows, const TensorView& row_ids, const TensorView& offsets);

}  // namespace glm5
