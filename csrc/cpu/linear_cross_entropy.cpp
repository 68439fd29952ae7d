#include "glm5/ops/linear_cross_entropy.h"

#include "cpu/kernel.h"
#include "cpu/vocab_tile.h"

namespace glm5::GLM5_LEVEL_NS {
namespace {

constexpr int64_t kIgnored = -100;

void check_targets(const int64_t* targets, int64_t rows, int64_t vocabulary) {
  for (int64_t row = 0; row < rows; ++row) {
    if (targets[row] != kIgnored && (targets[row] < 0 || targets[row] >= vocabulary)) {
      fail("linear_cross_entropy: targets[%lld] is %lld, needs -100 (ignored) or 0 <= target < %lld",
           static_cast<long long>(row), static_cast<long long>(targets[row]), static_cast<long long>(vocabulary));
    }
  }
}

}  // namespace
}  // namespace glm5::GLM5_LEVEL_NS

GLM5_KERNEL(linear_cross_entropy,
            (const Context& ctx, const TensorView& hidden, const TensorView& lm_head, const TensorView& targets,
             const TensorView& loss, const TensorView& lse),
            (ctx, hidden, lm_head, targets, loss, lse)) {
  (void)ctx;
  const int64_t rows = hidden.dim(0), vocabulary = lm_head.dim(0);
  const int64_t* wanted = targets.data<int64_t>();
  float *losses = loss.out<float>(), *sums = lse.out<float>();
  check_targets(wanted, rows, vocabulary);
  for_float_type("linear_cross_entropy: hidden", hidden.dtype(), [&](auto type) {
    using T = decltype(type);
    for_vocab_blocks(
        hidden.data<T>(), lm_head.data<T>(), rows, hidden.dim(1), vocabulary,
        [=](int64_t row, int64_t first, const float* logits, int64_t n) {
          // The target's logit waits in its loss.
          if (wanted[row] >= first && wanted[row] < first + n) losses[row] = logits[wanted[row] - first];
          return block_exp_sum(logits, n);
        },
        [=](int64_t row, const ExpSum& total) {
          sums[row] = log_sum(total);
          losses[row] = wanted[row] == kIgnored ? 0.0f : sums[row] - losses[row];
        });
  });
}
