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

// ln x of one number, good to about 1e-14: NaN below 0, -inf at 0, +inf and NaN stay.
GLM5_INLINE double log_of(float x) {
  if (!(x > 0.0f)) return x == 0.0f ? -__builtin_inf() : __builtin_nan("");
  if (x == __builtin_inff()) return x;
  const double wide = x;  // denormals of f32 are normal here
  uint64_t bits;
  std::memcpy(&bits, &wide, sizeof bits);
  // x = 2^e * m with m in [sqrt(1/2), sqrt(2)); ln m = 2 atanh(s) with s = (m - 1) / (m + 1), |s| < 0.172.
  const uint64_t shifted = bits - 0x3fe6a09e667f3bcdu;  // sqrt(1/2)
  const int64_t e = static_cast<int64_t>(shifted) >> 52;
  bits -= static_cast<uint64_t>(e) << 52;
  double m;
  std::memcpy(&m, &bits, sizeof m);
  const double s = (m - 1) / (m + 1), z = s * s;
  double sum = 0;
  for (int n = 17; n >= 1; n -= 2) sum = sum * z + 1.0 / n;
  return static_cast<double>(e) * 0x1.62e42fefa39efp-1 + 2 * s * sum;
}

}  // namespace glm5::GLM5_LEVEL_NS
