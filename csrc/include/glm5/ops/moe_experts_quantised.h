#pragma once

#include <optional>

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// moe_experts for weights of few bits: values and scales as in linear_quantised, each with an axis E before; the two
// weights may be of different kinds. Hidden rows are rounded to the dtype of x, then quantised like any activation.
void moe_experts_quantised(const Context& ctx, const TensorView& x, const TensorView& ids, const TensorView& weights,
                           const TensorView& gate_up, const TensorView& gate_up_scales, const TensorView& down,
                           const TensorView& down_scales, const std::optional<double>& limit, const TensorView& y);

}  // namespace glm5
