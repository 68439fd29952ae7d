// The K best of a row: exact, in one total order (value descending, then position ascending).
#pragma once

#include "cpu/vec.h"

namespace glm5::GLM5_LEVEL_NS {

constexpr int kSelectBuckets = 2048;

// Digit of `order` that a pass of the selection looks at: 11, 11 and 10 bits from the top.
GLM5_INLINE uint32_t select_digit(uint32_t order, int pass) {
  return pass == 0 ? order >> 21 : pass == 1 ? (order >> 10) & 2047u : order & 1023u;
}

// Copies the values whose digit of this pass is `digit`, in order; they may be copied onto themselves. Returns how
// many.
inline int64_t keep_digit(const uint32_t* orders, int64_t n, int pass, uint32_t digit, uint32_t* to) {
  int64_t kept = 0, i = 0;
#if GLM5_LEVEL >= 2
  const int shift = pass == 0 ? 21 : 10;
  const __m512i wanted = _mm512_set1_epi32(static_cast<int>(digit)), mask = _mm512_set1_epi32(2047);
  for (; i + 16 <= n; i += 16) {
    const __m512i v = _mm512_loadu_si512(orders + i);
    const __mmask16 same = _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_srli_epi32(v, shift), mask), wanted);
    if (same == 0) continue;
    _mm512_mask_compressstoreu_epi32(to + kept, same, v);
    kept += __builtin_popcount(same);
  }
#endif
  for (; i < n; ++i) {
    if (select_digit(orders[i], pass) == digit) to[kept++] = orders[i];
  }
  return kept;
}

// The k-th largest of n values (1 <= k <= n) is returned; *equal = how many values equal to it are among the k largest.
// `few` is scratch for n values: those that share the digits found so far.
inline uint32_t kth_largest(const uint32_t* orders, int64_t n, int64_t k, uint32_t* histogram, uint32_t* few,
                            int64_t* equal) {
  uint32_t prefix = 0;
  for (int pass = 0; pass < 3; ++pass) {
    std::memset(histogram, 0, kSelectBuckets * sizeof *histogram);
    for (int64_t i = 0; i < n; ++i) ++histogram[select_digit(orders[i], pass)];
    uint32_t digit = kSelectBuckets - 1;
    for (; histogram[digit] < k; --digit) k -= histogram[digit];
    prefix |= digit << (pass == 0 ? 21 : pass == 1 ? 10 : 0);
    if (pass == 2) break;
    n = keep_digit(orders, n, pass, digit, few);
    orders = few;
  }
  *equal = k;
  return prefix;
}

// Positions of the k largest of n values, ascending; all n positions when k >= n. Returns how many. `few` is scratch
// for n values, `positions` has room for k.
inline int64_t select_largest(const uint32_t* orders, int64_t n, int64_t k, uint32_t* histogram, uint32_t* few,
                              int32_t* positions) {
  if (k >= n) {
    for (int64_t i = 0; i < n; ++i) positions[i] = static_cast<int32_t>(i);
    return n;
  }
  if (k == 0) return 0;
  int64_t equal;
  const uint32_t least = kth_largest(orders, n, k, histogram, few, &equal);
  int64_t found = 0, i = 0;
#if GLM5_LEVEL >= 2
  const __m512i bound = _mm512_set1_epi32(static_cast<int>(least));
  __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  // Whole vectors while all of their ties are taken.
  for (; i + 16 <= n; i += 16, at = _mm512_add_epi32(at, _mm512_set1_epi32(16))) {
    const __m512i v = _mm512_loadu_si512(orders + i);
    const int64_t ties = __builtin_popcount(_mm512_cmpeq_epu32_mask(v, bound));
    if (ties > equal) break;
    equal -= ties;
    const __mmask16 chosen = _mm512_cmpge_epu32_mask(v, bound);
    _mm512_mask_compressstoreu_epi32(positions + found, chosen, at);
    found += __builtin_popcount(chosen);
  }
#endif
  for (; found < k; ++i) {
    const bool tie = orders[i] == least && equal > 0;
    positions[found] = static_cast<int32_t>(i);
    found += orders[i] > least || tie;
    equal -= tie;
  }
  return k;
}

}  // namespace glm5::GLM5_LEVEL_NS
