#pragma once

#include <optional>

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// y[t] = sum over the experts e of token t, ascending, of weight * w_down[e] (silu(gate) * up), gate and up the halves
// of w_gate_up[e] x[t]: x a[T, N], ids i32[T, A] (-1 = none), weights f32[T, A], w_gate_up a[E, 2*I, N],
// w_down a[E, N, I], y a[T, N]. The bits of moe_permute, grouped_gemm, silu_and_mul, grouped_gemm, moe_unpermute.
void moe_experts(const Context& ctx, const TensorView& x, const TensorView& ids, const TensorView& weights,
                 const TensorView& w_gate_up, const TensorView& w_down, const std::optional<double>& limit,
                 const TensorView& y);

}  // namespace glm5
