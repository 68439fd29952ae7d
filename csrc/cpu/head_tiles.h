// A product whose outputs belong to heads, each finished by the thread that computed it while it is in its cache.
#pragma once

#include "cpu/gemm_tile.h"

namespace glm5::GLM5_LEVEL_NS {

constexpr int64_t kHeadTileBytes = int64_t{1} << 20;

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
  const int64_t block = block_rows<T, T>(k), row_blocks = (tokens + block - 1) / block, units = row_blocks * heads;
  const int64_t most = tokens < block ? tokens : block, unit_work = most * (width + 1) * (k + 1);
  const int64_t grain = (int64_t{1} << 16) / unit_work + 1;
  const auto x_row = [=](int64_t r) { return x + r * k; };
  const auto w_row = [=](int64_t o) { return w + o * k; };
  const int threads = get_num_threads();
  if (threads == 1 || units >= 2 * threads || units <= grain) {
    // Heads go together while their tile stays in the cache and the threads have enough to share.
    int64_t together = kHeadTileBytes / (most * width * static_cast<int64_t>(sizeof(T)) + 1);
    if (together > units / (4 * threads)) together = units / (4 * threads);
    together = together < 1 ? 1 : together > heads ? heads : together;
    const int64_t parts = (heads + together - 1) / together;
    parallel_for(row_blocks * parts, grain / together + 1, [&](int64_t begin, int64_t end) {
      Scratch scratch;
      const int64_t stride = together * width;
      T* tile = scratch.take<T>(most * stride);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t h0 = unit % parts * together, h1 = h0 + together < heads ? h0 + together : heads;
        const int64_t r = unit / parts * block, last = r + block < tokens ? r + block : tokens;
        gemm_block(x_row, r, last, w_row, h0 * width, h1 * width, k,
                   [=](int64_t row, int64_t o, const float* values, int64_t n) {
                     store_values(tile + (row - r) * stride + (o - h0 * width), values, n);
                   });
        for (int64_t h = h0; h < h1; ++h) finish(h, r, last, static_cast<const T*>(tile + (h - h0) * width), stride);
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
  const int64_t chunk = (int64_t{8} << 20) / (row_bytes + 1) + 1;
  return chunk < tokens ? chunk : tokens;
}

}  // namespace glm5::GLM5_LEVEL_NS
