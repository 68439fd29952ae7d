// Rotary embedding of one row, shared by the plain and the fused kernels.
#pragma once

#include "cpu/vec.h"

namespace glm5::GLM5_LEVEL_NS {

// Spreads one row of the table (r/2 cosines, then r/2 sines) over the r elements they act on: element i becomes
// x[i] * c[i] + partner(x, i) * s[i].
GLM5_INLINE void rope_factors(const float* cos_sin, int64_t r, bool interleaved, float* c, float* s) {
  const int64_t half = r / 2;
  for (int64_t i = 0; i < half; ++i) {
    const int64_t first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
    c[first] = c[second] = cos_sin[i];
    s[first] = -cos_sin[half + i];
    s[second] = cos_sin[half + i];
  }
}

GLM5_INLINE f32v swap_neighbours(f32v v) {
#if GLM5_LEVEL >= 2
  return _mm512_permute_ps(v, 0xb1);
#elif GLM5_LEVEL == 1
  return _mm256_permute_ps(v, 0xb1);
#else
  return __builtin_shufflevector(v, v, 1, 0, 3, 2);
#endif
}

// One row of r elements (r even), each rounded once; both products are rounded before they are added, as written.
// y may be x only when interleaved.
template <class T>
GLM5_INLINE void rope_row(const T* x, int64_t r, bool interleaved, const float* c, const float* s, T* y) {
  if (interleaved) {
    for_lanes(r, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
      const f32v v = load(x + i, lanes);
      store(y + i, v * load(c + i, lanes) + swap_neighbours(v) * load(s + i, lanes), lanes);
    });
    return;
  }
  const int64_t half = r / 2;
  for (int64_t own = 0; own < r; own += half) {
    const int64_t other = half - own;
    for_lanes(half, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
      store(y + own + i,
            load(x + own + i, lanes) * load(c + own + i, lanes) + load(x + other + i, lanes) * load(s + own + i, lanes),
            lanes);
    });
    if (half == 0) return;
  }
}

}  // namespace glm5::GLM5_LEVEL_NS
