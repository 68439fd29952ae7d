// y[r, o] = x[r] . w[o] with weights of few bits: rows are quantised once, weights are read as they lie, unpacked.
//
// A kind (Int8, Int4, Fp8) says how a row is quantised and how some rows meet a panel of outputs. This file brings them
// together: many products over rows sorted by expert, or one, split over the thread pool. Where a kind's sums are exact
// integers, matrix tiles and vectors give the same bits, so that the number of rows may choose between them.
#pragma once

#include "cpu/int8_amx.h"
#include "cpu/quant_rows.h"
#include "glm5/scratch.h"
#include "glm5/thread_pool.h"

namespace glm5::GLM5_LEVEL_NS {

constexpr int kPanel = 32;             // outputs that are computed together
constexpr int64_t kBlockRows = 256;    // rows that share one pass over a panel
constexpr int64_t kTileRowsLeast = 5;  // below, vectors are as fast as tiles, which are 16 rows whatever they hold

// Quantised rows. `extra` is what mends unsigned weights, or unused.
template <class Kind>
struct Activations {
  typename Kind::Element* q;
  int64_t stride, scales_per_row;
  float* scale;
  int32_t* extra;

  Activations(Scratch& scratch, int64_t rows, int64_t k)
      : stride(Kind::padded(k) + 64),  // equal columns of neighbouring rows fall into different cache sets
        scales_per_row(Kind::scales_per_row(k)) {
    q = scratch.take<typename Kind::Element>(rows * stride);
    scale = scratch.take<float>(rows * scales_per_row);
    extra = scratch.take<int32_t>(rows * Kind::extras_per_row(k));
  }

  // x_row(r): the k values of row r, f32, bf16 or f16.
  template <class XRow>
  void quantise(int64_t rows, int64_t k, XRow&& x_row) const {
    const int64_t extras = Kind::extras_per_row(k);
    parallel_for(rows, (int64_t{1} << 14) / (k + 1) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        Kind::quantise(x_row(r), k, q + r * stride, scale + r * scales_per_row, extra + r * extras);
      }
    });
  }
};

// Rows offsets[e] .. offsets[e + 1] of every expert, and their B tiles where there are enough of them.
struct Groups {
  const int32_t* offsets;
  int64_t experts;
  const uint8_t** tiles = nullptr;  // of each expert, or null

  int64_t rows() const { return offsets[experts]; }
  // B tiles of rows r on, where r - offsets[e] is a multiple of 16.
  const uint8_t* tiles_at(int64_t e, int64_t r, int64_t steps) const {
#if GLM5_LEVEL >= 5
    return tiles == nullptr || tiles[e] == nullptr ? nullptr
                                                   : tiles[e] + (r - offsets[e]) / kTileHeight * steps * kTileSize;
#else
    (void)e, (void)r, (void)steps;
    return nullptr;
#endif
  }

  // row_of(r): where row r lies among the activations. Tiles live as long as `scratch`.
  template <class Kind, class RowOf>
  void pack(Scratch& scratch, const Activations<Kind>& x, int64_t k, RowOf&& row_of) {
#if GLM5_LEVEL >= 5
    if constexpr (Kind::kTiles) {
      const int64_t steps = Kind::padded(k) / kTileBytes;
      int64_t count = 0;
      for (int64_t e = 0; e < experts; ++e) count += tiles_of(e);
      if (count == 0) return;
      tiles = scratch.take<const uint8_t*>(experts);
      uint8_t* to = scratch.take<uint8_t>(count * steps * kTileSize);
      int32_t* first = scratch.take<int32_t>(count);
      int32_t* last = scratch.take<int32_t>(count);
      count = 0;
      for (int64_t e = 0; e < experts; ++e) {
        tiles[e] = tiles_of(e) > 0 ? to + count * steps * kTileSize : nullptr;
        for (int64_t i = 0; i < tiles_of(e); ++i)
          first[count] = offsets[e] + kTileHeight * i, last[count++] = offsets[e + 1];
      }
      parallel_for(count, 16 / (steps + 1) + 1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          const int8_t* rows[kTileHeight];
          // Columns past the last row repeat it; nobody reads what they give.
          for (int i = 0; i < kTileHeight; ++i) {
            const int64_t r = first[t] + i < last[t] ? first[t] + i : last[t] - 1;
            rows[i] = x.q + row_of(r) * x.stride;
          }
          for (int64_t s = 0; s < steps; ++s) pack_tile(rows, s * kTileBytes, to + (t * steps + s) * kTileSize);
        }
      });
    }
#else
    (void)scratch, (void)x, (void)k, (void)row_of;
#endif
  }

 private:
#if GLM5_LEVEL >= 5
  int64_t tiles_of(int64_t e) const {
    const int64_t rows = offsets[e + 1] - offsets[e];
    return rows < kTileRowsLeast ? 0 : (rows + kTileHeight - 1) / kTileHeight;
  }
#endif
};

// Rows [r0, r1) of one expert times outputs [o0, o1) on the calling thread.
//   row_of(r): where a row lies among the activations
//   tiles: the rows' B tiles or null
//   emit(r, o, values, n): receives outputs o .. o + n - 1 of row r as f32, unrounded, once each; n <= kPanel
template <class Kind, class RowOf, class Emit>
inline void quant_block(const Activations<Kind>& x, RowOf&& row_of, int64_t r0, int64_t r1, const uint8_t* tiles,
                        const typename Kind::Weight& w, int64_t o0, int64_t o1, Emit&& emit) {
#if GLM5_LEVEL >= 5
  if constexpr (Kind::kTiles) {
    if (tiles != nullptr) {
      Kind::tile_block(x, row_of, r0, r1, tiles, w, o0, o1, emit);
      return;
    }
  }
#endif
  (void)tiles;
  constexpr int R = Kind::kRows;
  const int64_t extras = Kind::extras_per_row(w.k);
  float values[R * kPanel];
  typename Kind::Panel panel(w, r1 - r0);
  for (int64_t o = o0; o < o1; o += kPanel) {
    const int outs = static_cast<int>(o1 - o < kPanel ? o1 - o : kPanel);
    panel.open(o, outs);
    auto strip = [&](int64_t r, auto count) {
      constexpr int C = decltype(count)::value;
      const typename Kind::Element* q[C];
      const float* scale[C];
      const int32_t* extra[C];
      for (int j = 0; j < C; ++j) {
        const int64_t row = row_of(r + j);
        q[j] = x.q + row * x.stride, scale[j] = x.scale + row * x.scales_per_row, extra[j] = x.extra + row * extras;
      }
      panel.template strip<C>(q, scale, extra, values);
      for (int j = 0; j < C; ++j) emit(r + j, o, values + j * kPanel, static_cast<int64_t>(outs));
    };
    int64_t r = r0;
    for (; r + R <= r1; r += R) strip(r, std::integral_constant<int, R>{});
    if constexpr (R > 2) {
      for (; r + 2 <= r1; r += 2) strip(r, std::integral_constant<int, 2>{});
    }
    for (; r < r1; ++r) strip(r, std::integral_constant<int, 1>{});
  }
}

// body(e, r, r_end, o, o_end) for every expert's rows and the outputs [0, outs), split over the thread pool so that
// many experts with one row and one expert with many rows both keep every thread busy. Blocks of rows begin at
// multiples of 16 from an expert's first.
template <class Body>
inline void for_quant_blocks(const Groups& groups, int64_t outs, int64_t k, Body&& body) {
  const int64_t all_rows = groups.rows();
  if (all_rows <= 0 || outs <= 0) return;
  struct Part {
    int64_t expert, first_unit, parts, width;
  };
  Scratch scratch;
  Part* parts = scratch.take<Part>(all_rows < groups.experts ? all_rows : groups.experts);
  const int64_t work = all_rows * outs * (k + 1), share = work / (4 * get_num_threads());
  const int64_t target = share > (1 << 17) ? share : 1 << 17;  // below, waking a thread costs more
  int64_t count = 0, units = 0;
  for (int64_t e = 0; e < groups.experts; ++e) {
    const int64_t rows = groups.offsets[e + 1] - groups.offsets[e];
    if (rows == 0) continue;
    int64_t width = target / ((rows < kBlockRows ? rows : kBlockRows) * (k + 1));
    width = width < 1 ? 1 : width > outs ? outs : width;
    width = (width + kPanel - 1) / kPanel * kPanel;
    parts[count++] = {e, units, (outs + width - 1) / width, width};
    units += (outs + width - 1) / width * ((rows + kBlockRows - 1) / kBlockRows);
  }
  parallel_for(units, work >> 17 ? 1 : units, [&](int64_t begin, int64_t end) {
    int64_t g = 0;
    for (int64_t unit = begin; unit < end; ++unit) {
      while (g + 1 < count && parts[g + 1].first_unit <= unit) ++g;
      const Part& part = parts[g];
      const int64_t e = part.expert, last = groups.offsets[e + 1], at = unit - part.first_unit;
      const int64_t r = groups.offsets[e] + at / part.parts * kBlockRows, o = at % part.parts * part.width;
      body(e, r, r + kBlockRows < last ? r + kBlockRows : last, o, o + part.width < outs ? o + part.width : outs);
    }
  });
}

}  // namespace glm5::GLM5_LEVEL_NS
