#include "glm5/ops/linear_entropy.h"

#include "cpu/kernel.h"
#include "cpu/vocab_tile.h"

GLM5_KERNEL(linear_entropy,
            (const Context& ctx, const TensorView& hidden, const TensorView& lm_head, const TensorView& entropy),
            (ctx, hidden, lm_head, entropy)) {
  (void)ctx;
  float* to = entropy.out<float>();
  for_float_type("linear_entropy: hidden", hidden.dtype(), [&](auto type) {
    using T = decltype(type);
    for_vocab_blocks(
        hidden.data<T>(), lm_head.data<T>(), hidden.dim(0), hidden.dim(1), lm_head.dim(0),
        [=](int64_t, int64_t, const float* logits, int64_t n) { return block_exp_sum_and_spread(logits, n); },
        [=](int64_t row, const ExpSum& total) {
          // sum of p * (lse - x) = ln(sum) + (sum of exp(x - max) * (max - x)) / sum: both parts are not negative.
          to[row] = static_cast<float>(log_of(total.sum)) + total.spread / total.sum;
        });
  });
}
