// A product whose outputs belong to heads, each finished by the thread that computed it while it is in its cache.
#pragma once

#include "cpu/gemm_tile.h"

namespace glm5::GLM5_LEVEL_NS {

// values, rounded to T.
template <class T>
GLM5_INLINE void store_values(T* to, const float* values, int64_t n) {
  for_lanes(
      n, [&](int64_t i, auto lanes) __attribute__((always_inline)) { store(to + i, load(values + i, lanes), lanes); });
}

// x[tokens, k] times w[heads * width, k], rounded to T:
//   finish(h, r0, r1, from, stride): the outputs of head h for rows [r0, r1), row r at from + (r - r0) * stride; once
//   for every row and head, from any thread.
template <class T, class Finish>
inline void gemm_heads(const T* x, const T* w, int64_t tokens, int64_t heads, int64_t width, int64_t k,
                       Finish&& finish) {
  if (tokens == 0 || heads == 0) return;
  const int64_t block = gemm_block_rows(k), row_blocks = (tokens + block - 1) / block, units = row_blocks * heads;
  const int64_t unit_work = (tokens < block ? tokens : block) * (width + 1) * (k + 1);
  const int64_t grain = (int64_t{1} << 16) / unit_work + 1;
  const auto x_row = [=](int64_t r) { return x + r * k; };
  const auto w_row = [=](int64_t o) { return w + o * k; };
  const int threads = get_num_threads();
  if (threads == 1 || units >= 2 * threads || units <= grain) {
    parallel_for(units, grain, [&](int64_t begin, int64_t end) {
      Scratch scratch;
      T* tile = scratch.take<T>((tokens < block ? tokens : block) * width);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t h = unit % heads, r = unit / heads * block, last = r + block < tokens ? r + block : tokens;
        gemm_block(x_row, r, last, w_row, h * width, (h + 1) * width, k,
                   [=](int64_t row, int64_t o, const float* values, int64_t n) {
                     store_values(tile + (row - r) * width + (o - h * width), values, n);
                   });
        finish(h, r, last, static_cast<const T*>(tile), width);
      }
    });
    return;
  }
  // Too few heads for the threads: the product is split by outputs first.
  Scratch scratch;
  const int64_t stride = heads * width;
  T* all = scratch.take<T>(tokens * stride);
  gemm(tokens, stride, k, x_row, w_row,
       [=](int64_t r, int64_t o, const float* values, int64_t n) { store_values(all + r * stride + o, values, n); });
  parallel_for(units, grain, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t h = unit % heads, r = unit / heads * block, last = r + block < tokens ? r + block : tokens;
      finish(h, r, last, static_cast<const T*>(all + r * stride + h * width), stride);
    }
  });
}

// Tokens are taken in chunks whose scratch rows of `row_bytes` fit.
GLM5_INLINE int64_t projection_chunk(int64_t tokens, int64_t row_bytes) {
  const int64_t chunk = (int64_t{64} << 20) / (row_bytes + 1) + 1;
  return chunk < tokens ? chunk : tokens;
}

}  // namespace glm5::GLM5_LEVEL_NS
