#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// One token per row by the Gumbel-max rule: logits f32[B, V], temperature f32[B] (<= 0 = greedy), top_k i32[B] (<= 0 =
// off), top_p f32[B] (>= 1 = off), min_p f32[B], seed i64[B], position i64[B] -> ids i64[B], logprob f32[B] (at
// temperature 1, unfiltered), logprob_processed f32[B] (of the distribution it was drawn from).
void sample(const Context& ctx, const TensorView& logits, const TensorView& temperature, const TensorView& top_k,
            const TensorView& top_p, const TensorView& min_p, const TensorView& seed, const TensorView& position,
            const TensorView& ids, const TensorView& logprob, const TensorView& logprob_processed);

}  // namespace glm5
