// The filters of sampling on one row: top-k, top-p and min-p in the order (logit descending, id ascending).
#pragma once

#include "cpu/rows/logsumexp.h"
#include "glm5/scratch.h"

namespace glm5::GLM5_LEVEL_NS {

// The first index of the largest value; values hold no NaN.
GLM5_INLINE int64_t first_best(const float* values, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 1; i < n; ++i) best = values[i] > values[best] ? i : best;
  return best;
}

// Every switch off: top_k <= 0, top_p >= 1, min_p <= 0.
struct Filters {
  int64_t top_k;
  float top_p, min_p;
};

// Ascending keys are descending values; -0 equals +0, and there is no NaN.
GLM5_INLINE uint32_t descending_key(float value) {
  uint32_t bits;
  value += 0.0f;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}

struct Ranked {
  uint32_t key;
  int32_t id;
};

// Sorts by key, stable, digit by digit; `other` is scratch of the same size.
inline void sort_by_key(Ranked* items, Ranked* other, int64_t n) {
  for (int shift = 0; shift < 32; shift += 8) {
    int64_t begin[257] = {};
    for (int64_t i = 0; i < n; ++i) ++begin[(items[i].key >> shift & 255) + 1];
    for (int d = 0; d < 256; ++d) begin[d + 1] += begin[d];
    for (int64_t i = 0; i < n; ++i) other[begin[items[i].key >> shift & 255]++] = items[i];
    Ranked* sorted = other;
    other = items, items = sorted;
  }
}

// The best tokens, sorted: all that can survive top_k or top_p. Returns how many. Only the coarse part of a key is
// looked at for tokens that cannot: a histogram of it shows where the k best, or the share top_p, must end.
inline int64_t rank_candidates(const float* logits, const float* weights, int64_t n, const Filters& filters,
                               double total, Ranked* candidates, Ranked* other) {
  constexpr int kCoarse = 2048, kShift = 21;
  const bool by_count = filters.top_k > 0 && filters.top_k < n;
  // A little more than top_p asks for: the exact walk decides, in f32.
  const double wanted = by_count ? static_cast<double>(filters.top_k) : filters.top_p * total * (1 + 1e-5);
  Scratch scratch;
  double* held = scratch.take<double>(kCoarse);
  for (int b = 0; b < kCoarse; ++b) held[b] = 0;
  for (int64_t i = 0; i < n; ++i) held[descending_key(logits[i]) >> kShift] += by_count ? 1.0 : weights[i];
  uint32_t last = 0;
  for (double sum = 0; last < kCoarse - 1; ++last) {
    sum += held[last];
    if (sum >= wanted && sum > 0) break;
  }
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t key = descending_key(logits[i]);
    if (key >> kShift <= last) candidates[found++] = {key, static_cast<int32_t>(i)};
  }
  sort_by_key(candidates, other, found);
  return by_count && found > filters.top_k ? filters.top_k : found;
}

// survivors[i] = scaled[i] where token i is kept, -inf elsewhere. logits (without NaN) give the order, scaled what is
// weighed; the best token is always kept.
inline void filter_row(const float* logits, const float* scaled, int64_t n, const Filters& filters, float* survivors) {
  const bool counted = filters.top_k > 0 && filters.top_k < n, nucleus = !(filters.top_p >= 1.0f);
  if (!counted && !nucleus && filters.min_p <= 0.0f) {
    std::memcpy(survivors, scaled, n * sizeof(float));
    return;
  }
  Scratch scratch;
  float* weights = scratch.take<float>(n);
  const f32v first = broadcast(max_of(scaled, n)), nothing = broadcast(-__builtin_inff());
  // Relative to the best token; 1, not NaN, where that one is infinite.
  for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    const f32v v = load(scaled + i, lanes);
    const f32v weight = exp(v == first ? f32v{} : v - first);
    store(weights + i, weight, lanes);
    store(survivors + i, weight >= filters.min_p ? v : nothing, lanes);
  });
  if (counted || nucleus) {
    double total = 0;
    for (int64_t i = 0; i < n; ++i) total += weights[i];
    Ranked *candidates = scratch.take<Ranked>(n), *other = scratch.take<Ranked>(n);
    const int64_t ranks = rank_candidates(logits, weights, n, filters, total, candidates, other);
    if (counted) {
      total = 0;
      for (int64_t r = 0; r < ranks; ++r) total += weights[candidates[r].id];
    }
    const float share = filters.top_p * static_cast<float>(total);
    for (int64_t i = 0; i < n; ++i) survivors[i] = -__builtin_inff();
    double before = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      const int32_t id = candidates[r].id;
      if ((nucleus && !(static_cast<float>(before) < share)) || !(weights[id] >= filters.min_p)) break;
      before += weights[id];
      survivors[id] = scaled[id];
    }
  }
  const int64_t best = first_best(logits, n);
  survivors[best] = scaled[best];
}

}  // namespace glm5::GLM5_LEVEL_NS
