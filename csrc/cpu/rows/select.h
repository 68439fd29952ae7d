// The K best of a row: exact, in one total order (value descending, then position ascending).
#pragma once

#include "cpu/vec.h"

namespace glm5::GLM5_LEVEL_NS {

constexpr int kSelectBuckets = 2048;

// Digit of `order` that a pass of the selection looks at: 11, 11 and 10 bits from the top.
GLM5_INLINE uint32_t select_digit(uint32_t order, int pass) {
  return pass == 0 ? order >> 21 : pass == 1 ? (order >> 10) & 2047u : order & 1023u;
}

// The k-th largest of n values (1 <= k <= n) is returned; *equal = how many values equal to it are among the k largest.
inline uint32_t kth_largest(const uint32_t* orders, int64_t n, int64_t k, uint32_t* histogram, int64_t* equal) {
  uint32_t prefix = 0, mask = 0;
  for (int pass = 0; pass < 3; ++pass) {
    std::memset(histogram, 0, kSelectBuckets * sizeof *histogram);
    for (int64_t i = 0; i < n; ++i) {
      if ((orders[i] & mask) == prefix) ++histogram[select_digit(orders[i], pass)];
    }
    uint32_t digit = kSelectBuckets - 1;
    for (; histogram[digit] < k; --digit) k -= histogram[digit];
    const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
    prefix |= digit << shift;
    mask |= (pass == 2 ? 1023u : 2047u) << shift;
  }
  *equal = k;
  return prefix;
}

// Positions of the k largest of n values, ascending; all n positions when k >= n. Returns how many.
inline int64_t select_largest(const uint32_t* orders, int64_t n, int64_t k, uint32_t* histogram, int32_t* positions) {
  if (k >= n) {
    for (int64_t i = 0; i < n; ++i) positions[i] = static_cast<int32_t>(i);
    return n;
  }
  if (k == 0) return 0;
  int64_t equal;
  const uint32_t least = kth_largest(orders, n, k, histogram, &equal);
  int64_t found = 0;
  for (int64_t i = 0; found < k; ++i) {
    const bool tie = orders[i] == least && equal > 0;
    positions[found] = static_cast<int32_t>(i);
    found += orders[i] > least || tie;
    equal -= tie;
  }
  return k;
}

}  // namespace glm5::GLM5_LEVEL_NS
