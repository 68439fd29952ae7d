// Rows of bf16 laid out as columns of pairs: what dot products by pairs and matrix tiles take as their second operand.
#pragma once

#include "cpu/transpose.h"

#if GLM5_LEVEL >= 4

namespace glm5::GLM5_LEVEL_NS {

constexpr int64_t kStep = 32;  // elements of a vector of pairs, and of one tile instruction

// The first n (at most 32) elements of a vector.
GLM5_INLINE __mmask32 first_elements(int64_t n) {
  return n < kStep ? (__mmask32{1} << n) - 1 : ~__mmask32{0};
}

// [steps * 16][columns] pairs of `columns` (at most 16) rows of x; rows past `rows` and k past the end are zero.
template <class XRow>
inline void pack_columns(XRow&& x_row, int64_t rows, int columns, int64_t k, uint32_t* to) {
  const int64_t steps = (k + kStep - 1) / kStep;
  for (int64_t s = 0; s < steps; ++s) {
    const int64_t at = s * kStep, left = k - at;
    const __mmask32 real = first_elements(left);
    f32v pairs[16];
    for (int c = 0; c < 16; ++c) {
      pairs[c] = c < rows ? (f32v)_mm512_maskz_loadu_epi16(real, x_row(c) + at) : f32v{};
      if (columns == 1) break;
    }
    if (columns == 1) {
      _mm512_storeu_ps(to + at / 2, pairs[0]);
      continue;
    }
    transpose(pairs);
    const __mmask16 lanes = static_cast<__mmask16>((1u << columns) - 1);
    for (int i = 0; i < 16; ++i) _mm512_mask_storeu_ps(to + (s * 16 + i) * columns, lanes, pairs[i]);
  }
}

}  // namespace glm5::GLM5_LEVEL_NS

#endif
