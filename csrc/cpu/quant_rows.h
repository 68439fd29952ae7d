// Rows of activations in 8 bits: the scales and roundings of the quantised formats, one function per formula.
//
//   int8: scale = max(amax, 1e-8) / 127, q = x / scale to nearest even, in [-127, 127]
//   e4m3: rows/fp8.h
// A NaN in a row makes its scale NaN, and with it everything that is computed from the row.
#pragma once

#include "cpu/rows/fp8.h"
#include "glm5/float8.h"

namespace glm5::GLM5_LEVEL_NS {

constexpr int64_t kGroup = 128;  // columns that share a scale, where there is one per group

GLM5_INLINE int64_t groups_of(int64_t n) {
  return (n + kGroup - 1) / kGroup;
}

// The int8 scale of n values.
template <class T>
GLM5_INLINE float int8_scale(const T* x, int64_t n) {
  const float amax = largest_magnitude(x, n);
  return (amax < 1e-8f ? 1e-8f : amax) / 127.0f;
}

// x / scale as integers. NaN becomes -127: its row's scale already says what it is.
GLM5_INLINE i32v to_int8(f32v x, f32v scale) {
  constexpr float kRound = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  const f32v quotient = min(broadcast(127.0f), max(x / scale, broadcast(-127.0f)));
  return (i32v)(quotient + kRound) - (i32v)broadcast(kRound);
}

// Codes of n values that share a scale, which is returned.
template <class T>
GLM5_INLINE float quantise_int8(const T* x, int64_t n, int8_t* q) {
  const float scale = int8_scale(x, n);
  const f32v divisor = broadcast(scale);
  for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    store_bytes(reinterpret_cast<uint8_t*>(q) + i, narrow_to_bytes((u32v)to_int8(load(x + i, lanes), divisor)), lanes);
  });
  return scale;
}

}  // namespace glm5::GLM5_LEVEL_NS
