// Rows into columns, in registers.
#pragma once

#include "cpu/vec.h"

namespace glm5::GLM5_LEVEL_NS {

// lane 0 of a, lane 0 of b, lane 1 of a, ...: the first or the second half of that.
GLM5_INLINE f32v zip_low(f32v a, f32v b) {
#if GLM5_LEVEL >= 2
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif GLM5_LEVEL == 1
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
  return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}
GLM5_INLINE f32v zip_high(f32v a, f32v b) {
#if GLM5_LEVEL >= 2
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif GLM5_LEVEL == 1
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// One round of the transposition: repeated log2(kLanes) times it turns rows into columns.
GLM5_INLINE void zip_halves(const f32v* from, f32v* to) {
#pragma GCC unroll 8
  for (int i = 0; i < kLanes / 2; ++i) {
    to[2 * i] = zip_low(from[i], from[i + kLanes / 2]);
    to[2 * i + 1] = zip_high(from[i], from[i + kLanes / 2]);
  }
}
GLM5_INLINE void transpose(f32v* rows) {
  f32v other[kLanes];
  zip_halves(rows, other);
  zip_halves(other, rows);
#if GLM5_LEVEL == 1
  zip_halves(rows, other);
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; ++i) rows[i] = other[i];
#elif GLM5_LEVEL >= 2
  zip_halves(rows, other);
  zip_halves(other, rows);
#endif
}

}  // namespace glm5::GLM5_LEVEL_NS
