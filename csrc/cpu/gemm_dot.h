// bf16 products by pairs (vdpbf16ps), rows as they lie in memory.
//
// k is cut into depths of kDotDepth. In each, an output owns 16 chains (lane l adds pairs l, l + 16, ... ascending, a
// masked tail) and one tree over the lanes; the depths are added ascending. The bits depend on the two rows and k.
#pragma once

#include "cpu/vec.h"
#include "glm5/scratch.h"

#if GLM5_LEVEL == 4

namespace glm5::GLM5_LEVEL_NS {

constexpr int kDotRows = 4, kDotOuts = 6;  // the register tile
constexpr int kDotPanel = 8 * kDotOuts;    // outputs whose results wait for the next depth
constexpr int64_t kDotDepth = 2048;        // six rows of w of this depth fit the first-level cache

GLM5_INLINE __m512bh load_pairs(const bf16* p, __mmask32 real) {
  return (__m512bh)_mm512_maskz_loadu_epi16(real, p);
}

// out[r * ld + o] (+)= x[r] . w[o] over elements [at, at + n).
template <int R, int O>
inline void dot_tile(const bf16* const* x, const bf16* const* w, int64_t at, int64_t n, bool add, float* out,
                     int64_t ld) {
  f32v sum[R * O] = {};
  const bf16 *xr[R], *wo[O];
  for (int r = 0; r < R; ++r) xr[r] = x[r] + at;
  for (int o = 0; o < O; ++o) wo[o] = w[o] + at;
  auto step = [&](int64_t i, __mmask32 real) __attribute__((always_inline)) {
    __m512bh xv[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) xv[r] = load_pairs(xr[r] + i, real);
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) {
      const __m512bh wv = load_pairs(wo[o] + i, real);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r * O + o] = _mm512_dpbf16_ps(sum[r * O + o], xv[r], wv);
    }
  };
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) step(i, ~__mmask32{0});
  if (i < n) step(i, (__mmask32{1} << (n - i)) - 1);
  float results[(R * O + 3) / 4 * 4];
#pragma GCC unroll 8
  for (int j = 0; j < R * O; j += 4) {
    reduce_add4(sum[j], j + 1 < R * O ? sum[j + 1] : f32v{}, j + 2 < R * O ? sum[j + 2] : f32v{},
                j + 3 < R * O ? sum[j + 3] : f32v{}, results + j);
  }
  for (int r = 0; r < R; ++r) {
    for (int o = 0; o < O; ++o) out[r * ld + o] = add ? out[r * ld + o] + results[r * O + o] : results[r * O + o];
  }
}

template <int O>
inline void dot_strip(const bf16* const* x, int64_t rows, const bf16* const* w, int64_t at, int64_t n, bool add,
                      float* out, int64_t ld) {
  int64_t r = 0;
  for (; r + kDotRows <= rows; r += kDotRows) dot_tile<kDotRows, O>(x + r, w, at, n, add, out + r * ld, ld);
  for (; r + 2 <= rows; r += 2) dot_tile<2, O>(x + r, w, at, n, add, out + r * ld, ld);
  for (; r < rows; ++r) dot_tile<1, O>(x + r, w, at, n, add, out + r * ld, ld);
}

// Rows [r0, r1), `block` at a time, times outputs [o0, o1); arguments as for gemm_block.
template <class XRow, class WRow, class Emit>
inline void dot_block(XRow&& x_row, int64_t r0, int64_t r1, int64_t block, WRow&& w_row, int64_t o0, int64_t o1,
                      int64_t k, Emit&& emit) {
  const int64_t most = r1 - r0 < block ? r1 - r0 : block;
  Scratch scratch;
  const bf16** x = scratch.take<const bf16*>(most);
  float* values = scratch.take<float>(most * kDotPanel);
  for (int64_t r = r0; r < r1; r += block) {
    const int64_t rows = r1 - r < block ? r1 - r : block;
    for (int64_t j = 0; j < rows; ++j) x[j] = x_row(r + j);
    for (int64_t o = o0; o < o1; o += kDotPanel) {
      const int outs = static_cast<int>(o1 - o < kDotPanel ? o1 - o : kDotPanel);
      const bf16* w[kDotPanel];
      for (int j = 0; j < outs; ++j) w[j] = w_row(o + j);
      int64_t at = 0;
      do {
        const int64_t n = k - at < kDotDepth ? k - at : kDotDepth;
        const bool add = at > 0;
        int j = 0;
        for (; j + kDotOuts <= outs; j += kDotOuts)
          dot_strip<kDotOuts>(x, rows, w + j, at, n, add, values + j, kDotPanel);
        for (; j + 2 <= outs; j += 2) dot_strip<2>(x, rows, w + j, at, n, add, values + j, kDotPanel);
        for (; j < outs; ++j) dot_strip<1>(x, rows, w + j, at, n, add, values + j, kDotPanel);
        at += n;
      } while (at < k);
      for (int64_t row = 0; row < rows; ++row) emit(r + row, o, values + row * kDotPanel, outs);
    }
  }
}

}  // namespace glm5::GLM5_LEVEL_NS

#endif
