// y[r, o] = sum_k x[r, k] * w[o, k], where a result's bits depend on its two rows, k and the level: nothing else.
//
// Each output owns kLanes chains along k (lane l adds k = l, l + kLanes, ... ascending, one fma each, a masked tail)
// and one fixed tree over the lanes. Tiles, panels and threads only choose which outputs are computed together.
// Two bf16 operands go through gemm_dot.h or gemm_amx.h where the level has them.
#pragma once

#include <type_traits>
#include <utility>

#include "cpu/gemm_amx.h"
#include "cpu/gemm_dot.h"
#include "cpu/vec.h"
#include "glm5/scratch.h"
#include "glm5/thread_pool.h"

namespace glm5::GLM5_LEVEL_NS {

// The register tile: kTileRows * kTileOuts accumulators, kTileRows vectors of x and one of w fit the registers.
#if GLM5_LEVEL >= 2
constexpr int kTileRows = 4, kTileOuts = 6;
#elif GLM5_LEVEL == 1
constexpr int kTileRows = 3, kTileOuts = 4;
#else
constexpr int kTileRows = 2, kTileOuts = 4;
#endif
constexpr int kPanelOuts = 8 * kTileOuts;          // outputs whose rows of w stay in the second-level cache
constexpr int64_t kBlockBytes = int64_t{1} << 19;  // f32 rows of x kept beside them

// out[r * O + o] = x[r] . w[o] for R x O rows of length k.
template <int R, int O, class X, class W>
inline void gemm_tile(const X* const* x, const W* const* w, int64_t k, float* out) {
  f32v sum[R * O] = {};
  const X* xr[R];
  const W* wo[O];
  for (int r = 0; r < R; ++r) xr[r] = x[r];
  for (int o = 0; o < O; ++o) wo[o] = w[o];
  for_lanes(k, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    f32v xv[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) xv[r] = load(xr[r] + i, lanes);
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) {
      const f32v wv = load(wo[o] + i, lanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r * O + o] = fma(xv[r], wv, sum[r * O + o]);
    }
  });
  int j = 0;
#pragma GCC unroll 8
  for (; j + 4 <= R * O; j += 4) reduce_add4(sum[j], sum[j + 1], sum[j + 2], sum[j + 3], out + j);
#pragma GCC unroll 4
  for (; j < R * O; ++j) out[j] = reduce_add(sum[j]);
}

// All `outs` outputs (at most kPanelOuts) of R rows; values has R rows of kPanelOuts.
template <int R, class X, class W>
inline void gemm_strip(const X* const* x, const W* const* w, int outs, int64_t k, float* values) {
  float tile[R * kTileOuts];
  auto put = [&](int o, int width) {
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < width; ++j) values[r * kPanelOuts + o + j] = tile[r * width + j];
    }
  };
  int o = 0;
  for (; o + kTileOuts <= outs; o += kTileOuts) gemm_tile<R, kTileOuts>(x, w + o, k, tile), put(o, kTileOuts);
  for (; o + 2 <= outs; o += 2) gemm_tile<R, 2>(x, w + o, k, tile), put(o, 2);
  for (; o < outs; ++o) gemm_tile<R, 1>(x, w + o, k, tile), put(o, 1);
}

// Rows of x (as f32) against one panel of w; emit(row, panel_values) once per row.
template <class W, class Emit>
inline void gemm_panel(const float* const* x, int64_t rows, const W* const* w, int outs, int64_t k, Emit&& emit) {
  float values[kTileRows * kPanelOuts];
  int64_t r = 0;
  auto emit_rows = [&](int count) {
    for (int j = 0; j < count; ++j) emit(r + j, values + j * kPanelOuts);
    r += count;
  };
  while (r + kTileRows <= rows) gemm_strip<kTileRows>(x + r, w, outs, k, values), emit_rows(kTileRows);
  if constexpr (kTileRows > 2) {
    while (r + 2 <= rows) gemm_strip<2>(x + r, w, outs, k, values), emit_rows(2);
  }
  while (r < rows) gemm_strip<1>(x + r, w, outs, k, values), emit_rows(1);
}

// Widens one row; exact, so it never changes a result.
template <class T>
GLM5_INLINE void widen_row(const T* from, int64_t n, float* to) {
  for_lanes(n,
            [&](int64_t i, auto lanes) __attribute__((always_inline)) { store(to + i, load(from + i, lanes), lanes); });
}

// Rows of f32 scratch are padded so that equal columns of neighbouring rows fall into different cache sets.
GLM5_INLINE int64_t padded_row(int64_t k) {
  return (k + 15) / 16 * 16 + 16;
}
GLM5_INLINE int64_t gemm_block_rows(int64_t k) {
  const int64_t rows = kBlockBytes / 4 / (k + 1) / kTileRows * kTileRows;
  return rows < 4 * kTileRows ? 4 * kTileRows : rows > 256 ? 256 : rows;
}

// Whether rows of X times rows of W are bf16 products with instructions of their own at this level.
template <class X, class W>
constexpr bool kBf16Products = GLM5_LEVEL >= 4 && std::is_same_v<X, bf16> && std::is_same_v<W, bf16>;

// Outputs are split between threads at multiples of this.
template <class X, class W>
constexpr int64_t kSplitOuts = kBf16Products<X, W> && GLM5_LEVEL >= 5 ? 32 : kTileOuts;

template <class F>
using row_element = std::remove_cv_t<std::remove_pointer_t<decltype(std::declval<F>()(int64_t{}))>>;

// Rows that go past a panel of w together.
template <class X, class W>
GLM5_INLINE int64_t block_rows(int64_t k) {
  if constexpr (!kBf16Products<X, W>) return gemm_block_rows(k);
  if constexpr (GLM5_LEVEL >= 5) return 512;
  const int64_t rows = kBlockBytes / 2 / (k + 1) / kTileRows * kTileRows;
  return rows < 4 * kTileRows ? 4 * kTileRows : rows > 256 ? 256 : rows;
}

// Rows [r0, r1) times outputs [o0, o1) on the calling thread.
//   x_row(r) -> const X*, w_row(o) -> const W*: rows of k elements, anywhere (a gather is fine)
//   emit(r, o, values, n): receives outputs o .. o+n-1 of row r as f32, once each; n <= kPanelOuts
template <class XRow, class WRow, class Emit>
inline void gemm_block(XRow&& x_row, int64_t r0, int64_t r1, WRow&& w_row, int64_t o0, int64_t o1, int64_t k,
                       Emit&& emit) {
#if GLM5_LEVEL >= 5
  using X = row_element<XRow>;
  using W = row_element<WRow>;
  if constexpr (kBf16Products<X, W>) {
    for (int64_t r = r0, rows; r < r1; r += rows) {
      rows = r1 - r < block_rows<X, W>(k) ? r1 - r : block_rows<X, W>(k);
      rows <= kFewRows ? amx_few_rows(x_row, r, rows, w_row, o0, o1, k, emit)
                       : amx_many_rows(x_row, r, rows, w_row, o0, o1, k, emit);
    }
    return;
  }
#elif GLM5_LEVEL == 4
  using X = row_element<XRow>;
  using W = row_element<WRow>;
  if constexpr (kBf16Products<X, W>) {
    return dot_block(x_row, r0, r1, block_rows<X, W>(k), w_row, o0, o1, k, emit);
  }
#endif
  const int64_t block = gemm_block_rows(k), stride = padded_row(k);
  const int64_t most = r1 - r0 < block ? r1 - r0 : block;
  // Few rows read w once: widening it first would only add traffic.
  const bool widen_w = most > 2 * kTileRows;
  Scratch scratch;
  const float** x = scratch.take<const float*>(most);
  float* x_wide = scratch.take<float>(sizeof(*x_row(0)) == 4 ? 0 : most * stride);
  float* w_wide = scratch.take<float>(widen_w ? kPanelOuts * stride : 0);
  for (int64_t r = r0; r < r1; r += block) {
    const int64_t rows = r1 - r < block ? r1 - r : block;
    for (int64_t j = 0; j < rows; ++j) {
      if constexpr (sizeof(*x_row(0)) == 4) {
        x[j] = x_row(r + j);
      } else {
        widen_row(x_row(r + j), k, x_wide + j * stride);
        x[j] = x_wide + j * stride;
      }
    }
    for (int64_t o = o0; o < o1; o += kPanelOuts) {
      const int outs = static_cast<int>(o1 - o < kPanelOuts ? o1 - o : kPanelOuts);
      auto emit_row = [&](int64_t j, const float* values) { emit(r + j, o, values, outs); };
      if (widen_w) {
        const float* w[kPanelOuts];
        for (int j = 0; j < outs; ++j) {
          widen_row(w_row(o + j), k, w_wide + j * stride);
          w[j] = w_wide + j * stride;
        }
        gemm_panel(x, rows, w, outs, k, emit_row);
      } else {
        decltype(w_row(0)) w[kPanelOuts];
        for (int j = 0; j < outs; ++j) w[j] = w_row(o + j);
        gemm_panel(x, rows, w, outs, k, emit_row);
      }
    }
  }
}

// The whole product over the thread pool; arguments as for gemm_block.
template <class XRow, class WRow, class Emit>
inline void gemm(int64_t rows, int64_t outs, int64_t k, XRow&& x_row, WRow&& w_row, Emit&& emit) {
  using X = row_element<XRow>;
  using W = row_element<WRow>;
  if (rows <= 0 || outs <= 0) return;
  constexpr int64_t granule = kSplitOuts<X, W>;
  const int64_t block = block_rows<X, W>(k);
  const int64_t row_blocks = (rows + block - 1) / block;
  const int64_t work = rows * outs * (k + 1);
  // Split outputs only as far as the threads need, in whole register tiles.
  int64_t parts = (4 * get_num_threads() + row_blocks - 1) / row_blocks;
  const int64_t worth = work / row_blocks >> 16;  // a part below 64K products is not worth a thread
  if (parts > worth) parts = worth > 1 ? worth : 1;
  const int64_t width = ((outs + parts - 1) / parts + granule - 1) / granule * granule;
  const int64_t out_parts = (outs + width - 1) / width;
  const int64_t grain = work >> 16 ? 1 : row_blocks * out_parts;
  parallel_for(row_blocks * out_parts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t r = unit / out_parts * block, o = unit % out_parts * width;
      gemm_block(x_row, r, r + block < rows ? r + block : rows, w_row, o, o + width < outs ? o + width : outs, k, emit);
    }
  });
}

}  // namespace glm5::GLM5_LEVEL_NS
