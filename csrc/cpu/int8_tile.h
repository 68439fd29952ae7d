// w8a8: int8 channels times int8 tokens. The sum is an exact integer, and value = sum * (sx * sw).
#pragma once

#include "cpu/int8_dot.h"
#include "cpu/quant_gemm.h"

namespace glm5::GLM5_LEVEL_NS {

struct Int8 {
  using Element = Quant;
  static constexpr bool kTiles = true;
#if GLM5_LEVEL >= 2
  static constexpr int kRows = 3, kOuts = 8;  // accumulators of a register tile
#else
  static constexpr int kRows = 2, kOuts = 4;
#endif

  struct Weight {
    const int8_t* values;  // [outs, k]
    const float* scales;   // [outs]
    int64_t outs, k;

    Weight at(int64_t e) const { return {values + e * outs * k, scales + e * outs, outs, k}; }
  };

  static int64_t padded(int64_t k) { return (k + 63) / 64 * 64; }
  static int64_t scales_per_row(int64_t) { return 1; }
  static int64_t extras_per_row(int64_t) { return 1; }

  template <class T>
  static void quantise(const T* x, int64_t k, Element* q, float* scale, int32_t* extra) {
    *scale = int8_scale(x, k);
    const f32v divisor = broadcast(*scale);
    i32v sum{};
    for_lanes(k, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
      const i32v v = to_int8(load(x + i, lanes), divisor);
      store_quants(q + i, v);  // past the end lie zeros of a row that is padded
      sum += v;
    });
    for (int64_t i = (k + kLanes - 1) / kLanes * kLanes; i < padded(k); i += kLanes) store_quants(q + i, i32v{});
    int32_t total = 0;
    for (int i = 0; i < kLanes; ++i) total += sum[i];
    *extra = -128 * total;
  }

  static GLM5_INLINE void store_quants(Element* to, i32v v) {
#if GLM5_LEVEL >= 3
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)v));
#elif GLM5_LEVEL == 2
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)v));
#else
    for (int i = 0; i < kLanes; ++i) to[i] = static_cast<Element>(v[i]);
#endif
  }

  // sums[r * kOuts + o] = x[r] . w[o].
  template <int R>
  static inline void tile(const Element* const* x, const int8_t* const* w, int64_t k, int32_t* sums) {
    i32v sum[R * kOuts] = {};
    const Element* xr[R];
    const int8_t* wo[kOuts];
    for (int r = 0; r < R; ++r) xr[r] = x[r];
    for (int o = 0; o < kOuts; ++o) wo[o] = w[o];
    auto step = [&](int64_t i, auto lanes) __attribute__((always_inline)) {
      xvec xv[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) xv[r] = load_x(xr[r] + i);
#pragma GCC unroll 8
      for (int o = 0; o < kOuts; ++o) {
        const wide_w wv = widen_w(load_w(wo[o] + i, lanes));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sum[r * kOuts + o] = dot(sum[r * kOuts + o], wv, xv[r]);
      }
    };
    int64_t i = 0;
    for (; i + kDotStep <= k; i += kDotStep) step(i, Full{});
    if (i < k) step(i, Part{static_cast<int>(k - i)});
#pragma GCC unroll 8
    for (int j = 0; j < R * kOuts; j += 4) sum_lanes4(sum + j, sums + j);
  }

  // values = sums * (sx * sw)
  static GLM5_INLINE void scale_row(const int32_t* sums, int32_t extra, float scale, const float* scales, int64_t n,
                                    float* values) {
    for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
      i32v sum;
      std::memcpy(&sum, sums + i, sizeof sum);
      const f32v exact = __builtin_convertvector(sum + extra, f32v);
      store(values + i, exact * (scale * load(scales + i, lanes)));
    });
  }

  struct Panel {
    const Weight& w;
    int64_t first = 0;
    int outs = 0;

    Panel(const Weight& weight, int64_t) : w(weight) {}
    void open(int64_t o, int count) { first = o, outs = count; }

    template <int R>
    void strip(const Element* const* x, const float* const* scale, const int32_t* const* extra, float* values) const {
      int32_t sums[R * kPanel], part[R * kOuts];
      for (int o = 0; o < outs; o += kOuts) {
        const int8_t* rows[kOuts];
        // Outputs past the last repeat it; nobody reads what they give.
        for (int j = 0; j < kOuts; ++j) rows[j] = w.values + (first + (o + j < outs ? o + j : outs - 1)) * w.k;
        tile<R>(x, rows, w.k, part);
        for (int r = 0; r < R; ++r) std::memcpy(sums + r * kPanel + o, part + r * kOuts, sizeof(int32_t) * kOuts);
      }
      for (int r = 0; r < R; ++r) {
        scale_row(sums + r * kPanel, kUnsignedWeights ? *extra[r] : 0, *scale[r], w.scales + first, outs,
                  values + r * kPanel);
      }
    }
  };

#if GLM5_LEVEL >= 5
  // 32 outputs and 32 rows at a time: two A tiles, two B tiles, four sums.
  template <class RowOf, class Emit>
  static void tile_block(const Activations<Int8>& x, RowOf&& row_of, int64_t r0, int64_t r1, const uint8_t* b,
                         const Weight& w, int64_t o0, int64_t o1, Emit&& emit) {
    const int64_t steps = padded(w.k) / kTileBytes, b_size = steps * kTileSize,
                  row_tiles = (r1 - r0 + kTileHeight - 1) / kTileHeight;
    Scratch scratch;
    uint8_t* packed = scratch.take<uint8_t>(2 * b_size);
    alignas(64) int32_t sums[2 * kTileHeight * kTileHeight], turned[kTileHeight * kPanel];
    float values[kPanel];
    const Tiles tiles(kTileHeight);
    for (int64_t o = o0; o < o1; o += kPanel) {
      const int64_t outs = o1 - o < kPanel ? o1 - o : kPanel;
      const uint8_t* a = reinterpret_cast<const uint8_t*>(w.values + o * w.k);
      int64_t stride = w.k, next = kTileBytes, second = kTileHeight * w.k;
      // What is read more than once, or has an end within a tile, is laid out tile by tile.
      if (row_tiles > 2 || outs < kPanel || w.k % kTileBytes != 0) {
        copy_tiles(a, w.k, outs, packed);
        a = packed, stride = 64, next = 2 * kTileSize, second = kTileSize;
      }
      for (int64_t t = 0; t < row_tiles; t += 2) {
        const uint8_t *b0 = b + t * b_size, *b1 = t + 1 < row_tiles ? b0 + b_size : b0;
        GLM5_TILE_ZERO(0);
        GLM5_TILE_ZERO(1);
        if (b1 != b0) {
          GLM5_TILE_ZERO(2);
          GLM5_TILE_ZERO(3);
          for (int64_t s = 0; s < steps; ++s) {
            GLM5_TILE_LOAD(6, b0 + s * kTileSize, 64);
            GLM5_TILE_LOAD(4, a + s * next, stride);
            GLM5_TILE_DOT(0, 4, 6);
            GLM5_TILE_LOAD(5, a + s * next + second, stride);
            GLM5_TILE_DOT(1, 5, 6);
            GLM5_TILE_LOAD(7, b1 + s * kTileSize, 64);
            GLM5_TILE_DOT(2, 4, 7);
            GLM5_TILE_DOT(3, 5, 7);
          }
        } else {
          for (int64_t s = 0; s < steps; ++s) {
            GLM5_TILE_LOAD(6, b0 + s * kTileSize, 64);
            GLM5_TILE_LOAD(4, a + s * next, stride);
            GLM5_TILE_DOT(0, 4, 6);
            GLM5_TILE_LOAD(5, a + s * next + second, stride);
            GLM5_TILE_DOT(1, 5, 6);
          }
        }
        auto give = [&](int64_t first_row) {
          turn_tile(sums, turned, kPanel);
          turn_tile(sums + kTileHeight * kTileHeight, turned + kTileHeight, kPanel);
          for (int64_t r = first_row; r < r1 && r < first_row + kTileHeight; ++r) {
            const int64_t row = row_of(r);
            scale_row(turned + (r - first_row) * kPanel, 0, x.scale[row], w.scales + o, outs, values);
            emit(r, o, values, outs);
          }
        };
        GLM5_TILE_STORE(0, sums);
        GLM5_TILE_STORE(1, sums + kTileHeight * kTileHeight);
        give(r0 + t * kTileHeight);
        if (b1 != b0) {
          GLM5_TILE_STORE(2, sums);
          GLM5_TILE_STORE(3, sums + kTileHeight * kTileHeight);
          give(r0 + (t + 1) * kTileHeight);
        }
      }
    }
  }

  // The panel as pairs of tiles, zeros past its outputs and past k.
  static void copy_tiles(const uint8_t* from, int64_t k, int64_t outs, uint8_t* to) {
    for (int64_t o = 0; o < kPanel; ++o) {
      uint8_t* row = to + o * 64;  // the second tile follows the first
      const uint8_t* w = from + o * k;
      int64_t i = 0;
      if (o < outs) {
        for (; i + 64 <= k; i += 64, row += 2 * kTileSize) std::memcpy(row, w + i, 64);
        if (i < k) {
          _mm512_storeu_si512(row, load_w(w + i, Part{static_cast<int>(k - i)}));
          i += 64, row += 2 * kTileSize;
        }
      }
      for (; i < k; i += 64, row += 2 * kTileSize) std::memset(row, 0, 64);
    }
  }
#endif
};

}  // namespace glm5::GLM5_LEVEL_NS
