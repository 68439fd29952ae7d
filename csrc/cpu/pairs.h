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

// Step s of pack_columns: [16][columns] pairs.
template <class XRow>
GLM5_INLINE void pack_step(XRow&& x_row, int64_t rows, int columns, int64_t k, int64_t s, uint32_t* to) {
  const int64_t at = s * kStep;
  const __mmask32 real = first_elements(k - at);
  if (columns == 1) {
    _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(real, x_row(0) + at));
    return;
  }
  f32v pairs[16];
  for (int c = 0; c < 16; ++c) pairs[c] = c < rows ? (f32v)_mm512_maskz_loadu_epi16(real, x_row(c) + at) : f32v{};
  transpose(pairs);
  const __mmask16 lanes = static_cast<__mmask16>((1u << columns) - 1);
  for (int i = 0; i < 16; ++i) _mm512_mask_storeu_ps(to + i * columns, lanes, pairs[i]);
}

// [steps * 16][columns] pairs of `columns` (at most 16) rows of x; rows past `rows` and k past the end are zero.
template <class XRow>
inline void pack_columns(XRow&& x_row, int64_t rows, int columns, int64_t k, uint32_t* to) {
  for (int64_t s = 0; s * kStep < k; ++s) pack_step(x_row, rows, columns, k, s, to + s * 16 * columns);
}

}  // namespace glm5::GLM5_LEVEL_NS

#endif
