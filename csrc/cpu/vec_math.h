// Elementary functions on a vector of f32: one formula each, shared by every kernel of a level.
#pragma once

#include "cpu/vec.h"

namespace glm5::GLM5_LEVEL_NS {

// e^x within 2 ulp: -inf gives +0, large x +inf, NaN stays NaN, denormal results are kept.
GLM5_INLINE f32v exp(f32v x) {
  constexpr float kLog2e = 1.44269504088896340736f;
  // ln 2 in two parts; the first has so few bits that n * high is exact.
  constexpr float kLn2High = 0x1.63p-1f, kLn2Low = -0x1.bd0106p-13f;
  constexpr float kRound = 0x1.8p23f;  // adding and subtracting it rounds to the nearest integer
  x = min(broadcast(90.0f), max(broadcast(-106.0f), x));
  const f32v n = (x * kLog2e + kRound) - kRound;
  f32v r = fma(n, broadcast(-kLn2High), x);
  r = fma(n, broadcast(-kLn2Low), r);
  // Taylor to degree 7: on |r| <= ln(2) / 2 what is left out is below a tenth of an ulp.
  f32v p = broadcast(1.0f / 5040);
  p = fma(p, r, broadcast(1.0f / 720));
  p = fma(p, r, broadcast(1.0f / 120));
  p = fma(p, r, broadcast(1.0f / 24));
  p = fma(p, r, broadcast(1.0f / 6));
  p = fma(p, r, broadcast(0.5f));
  p = fma(p, r, broadcast(1.0f));
  p = fma(p, r, broadcast(1.0f));
  // 2^n in two factors, so that neither leaves the range of normal numbers.
  const i32v exponent = __builtin_convertvector(n, i32v);
  const i32v first = exponent >> 1;
  const f32v low = (f32v)((first + 127) << 23);
  const f32v high = (f32v)((exponent - first + 127) << 23);
  return p * low * high;
}

// 1 / (1 + e^-x)
GLM5_INLINE f32v sigmoid(f32v x) {
  return 1.0f / (1.0f + exp(-x));
}

// x * sigmoid(x)
GLM5_INLINE f32v silu(f32v x) {
  return x / (1.0f + exp(-x));
}

}  // namespace glm5::GLM5_LEVEL_NS
