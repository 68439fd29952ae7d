// bf16 products on AMX tiles: 16 rows of one factor (as they lie in memory) times up to 16 of the other (in pairs).
//
// A result takes its k in steps of 32 ascending, the last filled with zeros, each step as the tile instruction adds it:
// the bits depend on the two rows and k alone. Results that leave their tile between depths are kept as they are.
#pragma once

#include "cpu/pairs.h"
#include "cpu/tiles.h"
#include "cpu/transpose.h"
#include "glm5/scratch.h"

#if GLM5_LEVEL >= 5

namespace glm5::GLM5_LEVEL_NS {

constexpr int64_t kFewRows = 128;    // up to so many rows, laying w out in pairs costs more than it brings
constexpr int64_t kDepthSteps = 16;  // of many rows: steps whose w and x stay in the caches
constexpr int64_t kChunkOuts = 256;  // of many rows: outputs whose unfinished results stay in the second-level cache
constexpr int64_t kTilePair = 2 * kTileHeight;
constexpr int64_t kAheadBytes = 512;  // how far before its use w is asked for

// Sixteen rows of a factor as tiles, one a step: the first `whole_steps` where they lie, `stride` bytes from row to
// row; the others, which were copied and filled with zeros, one behind the other.
struct TileRows {
  const char* first;
  int64_t stride, whole_steps;
  const char* copied;

  GLM5_INLINE const char* tile(int64_t s, int64_t* row_bytes) const {
    *row_bytes = s < whole_steps ? stride : kTileBytes;
    return s < whole_steps ? first + s * kTileBytes : copied + (s - whole_steps) * kTileSize;
  }
};

// Step s of `rows` (at most 16) rows of w as a whole tile.
template <class WRow>
GLM5_INLINE void copy_tile(WRow&& w_row, int64_t rows, int64_t s, int64_t k, char* to) {
  const __mmask32 real = first_elements(k - s * kStep);
  for (int64_t r = 0; r < kTileHeight; ++r) {
    const __m512i row = r < rows ? _mm512_maskz_loadu_epi16(real, w_row(r) + s * kStep) : _mm512_setzero_si512();
    _mm512_store_si512(to + r * kTileBytes, row);
  }
}

// Rows o .. o + rows - 1 of w, in place when they lie evenly; else copied to `buffer` ([steps] tiles).
template <class WRow>
inline TileRows tile_rows(WRow&& w_row, int64_t o, int64_t rows, int64_t k, char* buffer) {
  auto row = [&](int64_t r) __attribute__((always_inline)) { return w_row(o + r); };
  const int64_t steps = (k + kStep - 1) / kStep;
  const char* first = reinterpret_cast<const char*>(row(0));
  int64_t stride = 0;
  bool even = rows == kTileHeight;
  if (even) {
    stride = reinterpret_cast<const char*>(row(1)) - first;
    for (int64_t r = 2; r < rows; ++r) even &= reinterpret_cast<const char*>(row(r)) - first == r * stride;
  }
  if (even) {
    if (k % kStep) copy_tile(row, rows, steps - 1, k, buffer);
    return {first, stride, k / kStep, buffer};
  }
  for (int64_t s = 0; s < steps; ++s) copy_tile(row, rows, s, k, buffer + s * kTileSize);
  return {nullptr, 0, 0, buffer};
}

GLM5_INLINE void ask_for(const char* tile, int64_t stride) {
  for (int r = 0; r < kTileHeight; ++r) _mm_prefetch(tile + r * stride + kAheadBytes, _MM_HINT_T1);
}

// Sums steps [s0, s1) of W (1 or 2) times 16 outputs and C (1 or 2) blocks of columns into tiles 0 .. 3 (2 * w + c).
// Ahead: w comes from memory, and is asked for before its use.
template <int W, int C, bool Ahead>
GLM5_INLINE void tile_steps(const TileRows* w, const uint32_t* const* x, int columns, int64_t s0, int64_t s1) {
  const int64_t x_row = 4 * columns, x_step = 16 * columns;
  for (int64_t s = s0; s < s1; ++s) {
    int64_t stride;
    const char* tile = w[0].tile(s, &stride);
    if constexpr (Ahead) ask_for(tile, stride);
    _tile_loadd(4, tile, stride);
    _tile_loadd(6, x[0] + s * x_step, x_row);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (C > 1) {
      _tile_loadd(7, x[1] + s * x_step, x_row);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (W > 1) {
      tile = w[1].tile(s, &stride);
      if constexpr (Ahead) ask_for(tile, stride);
      _tile_loadd(5, tile, stride);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (C > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// Results of two groups of outputs and two blocks of columns, from and to memory: rows `row_bytes` apart, the second
// block `c` and the second group `w` floats behind the first.
template <int W, int C>
GLM5_INLINE void load_results(const float* from, bool zero, int64_t row_bytes, int64_t c = 256, int64_t w = 512) {
  if (zero) {
    _tile_zero(0);
    if constexpr (C > 1) _tile_zero(1);
    if constexpr (W > 1) _tile_zero(2);
    if constexpr (W > 1 && C > 1) _tile_zero(3);
    return;
  }
  _tile_loadd(0, from, row_bytes);
  if constexpr (C > 1) _tile_loadd(1, from + c, row_bytes);
  if constexpr (W > 1) _tile_loadd(2, from + w, row_bytes);
  if constexpr (W > 1 && C > 1) _tile_loadd(3, from + w + c, row_bytes);
}
template <int W, int C>
GLM5_INLINE void store_results(float* to, int64_t row_bytes, int64_t c = 256, int64_t w = 512) {
  _tile_stored(0, to, row_bytes);
  if constexpr (C > 1) _tile_stored(1, to + c, row_bytes);
  if constexpr (W > 1) _tile_stored(2, to + w, row_bytes);
  if constexpr (W > 1 && C > 1) _tile_stored(3, to + w + c, row_bytes);
}

// Emits finished tiles: `columns` rows of x from row r, `outs` (at most 32) outputs from o.
template <class Emit>
inline void emit_results(const float* results, int columns, int64_t r, int64_t rows, int64_t o, int64_t outs,
                         Emit&& emit) {
  const int64_t blocks = (rows + 15) / 16;
  alignas(64) float values[16 * kTilePair];
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t here = rows - 16 * b < 16 ? rows - 16 * b : 16;
    for (int64_t w = 0; w * kTileHeight < outs; ++w) {
      const float* tile = results + (2 * w + b) * 256;
      if (columns == 1) {
        store(values + w * kTileHeight, load(tile));
        continue;
      }
      f32v lanes[16];
      const __mmask16 real = static_cast<__mmask16>((1u << columns) - 1);
      for (int i = 0; i < 16; ++i) lanes[i] = _mm512_maskz_loadu_ps(real, tile + i * columns);
      transpose(lanes);
      for (int64_t c = 0; c < here; ++c) store(values + c * kTilePair + w * kTileHeight, lanes[c]);
    }
    for (int64_t c = 0; c < here; ++c) emit(r + 16 * b + c, o, values + c * kTilePair, outs);
  }
}

template <int W, int C, bool Ahead>
GLM5_INLINE void few_rows_tile(const TileRows* w, const uint32_t* const* x, int columns, int64_t steps,
                               float* results) {
  load_results<W, C>(results, true, 4 * columns);
  tile_steps<W, C, Ahead>(w, x, columns, 0, steps);
  store_results<W, C>(results, 4 * columns);
}
template <int W, bool Ahead>
GLM5_INLINE void few_rows_tiles(const TileRows* w, const uint32_t* x, int64_t rows, int columns, int64_t steps,
                                float* results) {
  const uint32_t* blocks[2] = {x, x + steps * 16 * columns};
  rows > 16 ? few_rows_tile<W, 2, Ahead>(w, blocks, columns, steps, results)
            : few_rows_tile<W, 1, Ahead>(w, blocks, columns, steps, results);
}

// At most kFewRows rows: every weight is read from where it lies; the first 32 rows wait for memory, the others find it
// in the cache.
template <class XRow, class WRow, class Emit>
inline void amx_few_rows(XRow&& x_row, int64_t r0, int64_t rows, WRow&& w_row, int64_t o0, int64_t o1, int64_t k,
                         Emit&& emit) {
  const int64_t steps = (k + kStep - 1) / kStep, blocks = (rows + 15) / 16;
  const int columns = static_cast<int>(rows < 16 ? rows : 16);
  Scratch scratch;
  uint32_t* x = scratch.take<uint32_t>(blocks * steps * 16 * 16);
  char* buffer = scratch.take<char>(2 * steps * kTileSize);
  alignas(64) float results[4 * 256];
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t left = rows - 16 * b;
    pack_columns([&](int64_t c) { return x_row(r0 + 16 * b + c); }, left < 16 ? left : 16, columns, k,
                 x + b * steps * 16 * columns);
  }
  Tiles tiles(columns);
  for (int64_t o = o0; o < o1; o += kTilePair) {
    const int64_t outs = o1 - o < kTilePair ? o1 - o : kTilePair;
    TileRows w[2];
    w[0] = tile_rows(w_row, o, outs < kTileHeight ? outs : kTileHeight, k, buffer);
    if (outs > kTileHeight) {
      w[1] = tile_rows(w_row, o + kTileHeight, outs - kTileHeight, k, buffer + steps * kTileSize);
    }
    for (int64_t r = 0; r < rows; r += 32) {
      const int64_t here = rows - r < 32 ? rows - r : 32;
      const uint32_t* from = x + r / 16 * steps * 16 * columns;
      if (outs <= kTileHeight) {
        few_rows_tiles<1, true>(w, from, here, columns, steps, results);
      } else if (r == 0) {
        few_rows_tiles<2, true>(w, from, here, columns, steps, results);
      } else {
        few_rows_tiles<2, false>(w, from, here, columns, steps, results);
      }
      emit_results(results, columns, r0 + r, here, o, outs, emit);
    }
  }
}

// Any number of rows: those of x lie in the tiles for rows and w, laid out in pairs a depth at a time, in those for
// columns, so that results come out by rows of x. The products are the same, factors swapped.
template <class XRow, class WRow, class Emit>
inline void amx_many_rows(XRow&& x_row, int64_t r0, int64_t rows, WRow&& w_row, int64_t o0, int64_t o1, int64_t k,
                          Emit&& emit) {
  constexpr int64_t kRowBytes = 4 * kTilePair;  // a result is 32 rows of 32 outputs
  const int64_t steps = (k + kStep - 1) / kStep, pairs = (rows + kTilePair - 1) / kTilePair;
  const bool whole = steps <= kDepthSteps;
  Scratch scratch;
  char* x = scratch.take<char>(2 * pairs * steps * kTileSize);
  uint32_t* panel = scratch.take<uint32_t>(2 * kDepthSteps * 256);
  float* unfinished = scratch.take<float>((whole ? 1 : kChunkOuts / kTilePair * pairs) * kTilePair * kTilePair);
  for (int64_t b = 0; b < 2 * pairs; ++b) {
    const int64_t left = rows - b * kTileHeight, here = left < 0 ? 0 : left < kTileHeight ? left : kTileHeight;
    auto row = [&](int64_t r) __attribute__((always_inline)) { return x_row(r0 + b * kTileHeight + r); };
    for (int64_t s = 0; s < steps; ++s) copy_tile(row, here, s, k, x + (b * steps + s) * kTileSize);
  }
  Tiles tiles(16);
  for (int64_t chunk = o0; chunk < o1; chunk += kChunkOuts) {
    const int64_t chunk_end = chunk + kChunkOuts < o1 ? chunk + kChunkOuts : o1;
    for (int64_t s0 = 0; s0 < steps || s0 == 0; s0 += kDepthSteps) {
      const int64_t depth = steps - s0 < kDepthSteps ? steps - s0 : kDepthSteps;
      for (int64_t o = chunk; o < chunk_end; o += kTilePair) {
        const int64_t outs = chunk_end - o < kTilePair ? chunk_end - o : kTilePair;
        for (int64_t g = 0; g < 2; ++g) {
          const int64_t left = outs - g * kTileHeight, here = left < 0 ? 0 : left < kTileHeight ? left : kTileHeight;
          auto row = [&](int64_t r) __attribute__((always_inline)) { return w_row(o + g * kTileHeight + r); };
          for (int64_t s = 0; s < depth; ++s) pack_step(row, here, 16, k, s0 + s, panel + (g * kDepthSteps + s) * 256);
        }
        const uint32_t* w[2] = {panel, panel + kDepthSteps * 256};
        for (int64_t p = 0; p < pairs; ++p) {
          const char* tile = x + (2 * p * steps + s0) * kTileSize;
          const TileRows block[2] = {{nullptr, 0, 0, tile}, {nullptr, 0, 0, tile + steps * kTileSize}};
          float* results = unfinished + (whole ? 0 : ((o - chunk) / kTilePair * pairs + p) * kTilePair * kTilePair);
          load_results<2, 2>(results, s0 == 0, kRowBytes, kTileHeight, kTileHeight * kTilePair);
          tile_steps<2, 2, false>(block, w, 16, 0, depth);
          store_results<2, 2>(results, kRowBytes, kTileHeight, kTileHeight * kTilePair);
          if (s0 + depth < steps) continue;
          const int64_t here = rows - p * kTilePair < kTilePair ? rows - p * kTilePair : kTilePair;
          for (int64_t r = 0; r < here; ++r) emit(r0 + p * kTilePair + r, o, results + r * kTilePair, outs);
        }
      }
    }
  }
}

}  // namespace glm5::GLM5_LEVEL_NS

#endif
