#pragma once

#include <optional>

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// The router: x a[T, N], w f32[E, N], bias f32[E] or absent -> ids i32[T, topk] ascending in each row, weights
// f32[T, topk]. Experts are chosen by score + bias inside the best topk_group of n_group groups, weighed by score.
//   score: "sigmoid" or "softmax" of x w^T / temperature
//   renormalise: divide the weights by their sum; scale: factor of the weights at the end
void moe_gate(const Context& ctx, const TensorView& x, const TensorView& w, const std::optional<TensorView>& bias,
              int64_t topk, int64_t n_group, int64_t topk_group, const char* score, bool renormalise, double scale,
              double temperature, const TensorView& ids, const TensorView& weights);

}  // namespace glm5
