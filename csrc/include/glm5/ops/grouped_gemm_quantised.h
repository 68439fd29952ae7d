#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// grouped_gemm for a weight of few bits: values and scales as in linear_quantised, each with an axis E before.
void grouped_gemm_quantised(const Context& ctx, const TensorView& x, const TensorView& values, const TensorView& scales,
                            const TensorView& offsets, const TensorView& y);

}  // namespace glm5
