// The one log-sum-exp behind sampling, the loss and entropies: whoever sees the same logits gets the same bits.
//
// Columns are taken in blocks of 1024, each with its own maximum and its sum of exp(x - maximum) in the order of
// sum_row; blocks merge ascending. A NaN makes the result NaN, a row of -inf gives -inf.
#pragma once

#include "cpu/vec_math.h"

namespace glm5::GLM5_LEVEL_NS {

constexpr int64_t kVocabBlock = 1024;

// The sum of exp(x - max) over some columns; `spread` the sum of exp(x - max) * (max - x), where it is asked for.
struct ExpSum {
  float max = -__builtin_inff();
  float sum = 0.0f;
  float spread = 0.0f;
};

GLM5_INLINE float max_of(const float* x, int64_t n) {
  f32v most = broadcast(-__builtin_inff());
  for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    most = max(fill_past(load(x + i, lanes), lanes, -__builtin_inff()), most);
  });
  return reduce_max(most);
}

// 0 in place of -inf: exp(-inf - 0) is the 0 that exp(-inf + inf) is not.
GLM5_INLINE float finite_shift(float most) {
  return most == -__builtin_inff() ? 0.0f : most;
}

// One block: n <= kVocabBlock columns.
GLM5_INLINE ExpSum block_exp_sum(const float* x, int64_t n) {
  ExpSum block;
  block.max = max_of(x, n);
  const f32v shift = broadcast(finite_shift(block.max));
  block.sum = sum_row(n, [&](f32v chain, int64_t i, auto lanes) __attribute__((always_inline)) {
    return chain + fill_past(exp(load(x + i, lanes) - shift), lanes, 0.0f);
  });
  return block;
}

// exp(-128) is 0 already: bounding by it keeps 0 * inf from becoming NaN.
constexpr float kNothingBelow = 128.0f;
GLM5_INLINE float bounded(float below) {
  return below < kNothingBelow ? below : kNothingBelow;
}

// The same block with its spread: terms that are never negative, so nothing cancels.
GLM5_INLINE ExpSum block_exp_sum_and_spread(const float* x, int64_t n) {
  ExpSum block = block_exp_sum(x, n);
  const f32v shift = broadcast(finite_shift(block.max));
  block.spread = sum_row(n, [&](f32v chain, int64_t i, auto lanes) __attribute__((always_inline)) {
    const f32v below = shift - load(x + i, lanes);
    return chain + fill_past(exp(-below) * min(broadcast(kNothingBelow), below), lanes, 0.0f);
  });
  return block;
}

// total = total and then block, both over the larger maximum.
GLM5_INLINE void merge(ExpSum& total, const ExpSum& block) {
  const float most = total.max < block.max ? block.max : total.max;
  const float shift = finite_shift(most);
  f32v scale{};
  scale[0] = total.max - shift, scale[1] = block.max - shift;
  scale = exp(scale);
  total.spread = scale[0] * (total.spread + bounded(most - total.max) * total.sum) +
                 scale[1] * (block.spread + bounded(most - block.max) * block.sum);
  total.sum = total.sum * scale[0] + block.sum * scale[1];
  total.max = most;
}

// ln of the whole sum.
GLM5_INLINE float log_sum(const ExpSum& total) {
  return total.max + static_cast<float>(log_of(total.sum));
}

// A whole row.
inline float log_sum_exp(const float* x, int64_t n) {
  ExpSum total;
  for (int64_t i = 0; i < n; i += kVocabBlock) {
    merge(total, block_exp_sum(x + i, n - i < kVocabBlock ? n - i : kVocabBlock));
  }
  return log_sum(total);
}

}  // namespace glm5::GLM5_LEVEL_NS
