// w4a8: int4 weights in groups of 128 times int8 tokens. Each group's sum is an exact integer; value is the f32 sum
// over groups, ascending, of sum * (sx * sw), a product and an addition of their own. So every level has the same bits.
//
// A group is 64 bytes, the even elements in the low four bits. Tokens are taken apart instead of weights: 64 even
// elements, then 64 odd ones.
#pragma once

#include "cpu/int8_tile.h"

namespace glm5::GLM5_LEVEL_NS {

struct Int4 {
  using Element = Quant;
  static constexpr bool kTiles = true;
  static constexpr int kRows = 2, kOuts = 4;  // accumulators of a register tile

  struct Weight {
    const uint8_t* values;  // [outs, ceil(k / 2)]
    const float* scales;    // [outs, groups]
    int64_t outs, k;

    int64_t bytes() const { return (k + 1) / 2; }
    Weight at(int64_t e) const { return {values + e * outs * bytes(), scales + e * outs * groups_of(k), outs, k}; }
  };

  static int64_t padded(int64_t k) { return groups_of(k) * kGroup; }
  static int64_t scales_per_row(int64_t) { return 1; }
  static int64_t extras_per_row(int64_t k) { return groups_of(k); }

  template <class T>
  static void quantise(const T* x, int64_t k, Element* q, float* scale, int32_t* extra) {
    *scale = int8_scale(x, k);
    const f32v divisor = broadcast(*scale);
    int32_t wide[kGroup];
    for (int64_t g = 0; g < groups_of(k); ++g, q += kGroup) {
      const int64_t first = g * kGroup, n = k - first < kGroup ? k - first : kGroup;
      std::memset(wide, 0, sizeof wide);
      i32v sum{};
      for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
        const i32v v = to_int8(load(x + first + i, lanes), divisor);
        std::memcpy(wide + i, &v, sizeof v);
        sum += v;
      });
      for (int i = 0; i < kGroup / 2; ++i) {
        q[i] = static_cast<Element>(wide[2 * i]);
        q[kGroup / 2 + i] = static_cast<Element>(wide[2 * i + 1]);
      }
      int32_t total = 0;
      for (int i = 0; i < kLanes; ++i) total += sum[i];
      extra[g] = -8 * total;
    }
  }

  // sums[r * kPanel + o] of one group: x has its 128 elements, w its bytes, `size` of them.
  template <int R>
  static GLM5_INLINE void group_tile(const Element* const* x, const uint8_t* const* w, int64_t size, int32_t* sums) {
    i32v sum[R * kOuts] = {};
    auto step = [&](int64_t i, auto lanes) __attribute__((always_inline)) {
      xvec even[R], odd[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) even[r] = load_x(x[r] + i), odd[r] = load_x(x[r] + kGroup / 2 + i);
#pragma GCC unroll 4
      for (int o = 0; o < kOuts; ++o) {
        wide_w low, high;
        split_w(load_w(w[o] + i, lanes), &low, &high);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          sum[r * kOuts + o] = dot(dot(sum[r * kOuts + o], low, even[r]), high, odd[r]);
        }
      }
    };
    int64_t i = 0;
    for (; i + kDotStep <= size; i += kDotStep) step(i, Full{});
    if (i < size) step(i, Part{static_cast<int>(size - i)});
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sum_lanes4(sum + r * kOuts, sums + r * kPanel);
  }

  struct Panel {
    const Weight& w;
    Scratch scratch;
    float* scales;  // [groups, kPanel]: turned over, so that outputs are lanes
    int64_t first = 0;
    int outs = 0;

    Panel(const Weight& weight, int64_t) : w(weight), scales(scratch.take<float>(groups_of(weight.k) * kPanel)) {}
    void open(int64_t o, int count) {
      first = o, outs = count;
      turn_scales(w, o, count, scales);
    }

    template <int R>
    void strip(const Element* const* x, const float* const* scale, const int32_t* const* extra, float* values) const {
      alignas(64) int32_t sums[R * kPanel];
      const uint8_t* rows[kPanel];
      const int64_t bytes = w.bytes();
      // Outputs past the last repeat it; nobody reads what they give.
      for (int j = 0; j < kPanel; ++j) rows[j] = w.values + (first + (j < outs ? j : outs - 1)) * bytes;
      for (int i = 0; i < R * kPanel; i += kLanes) store(values + i, f32v{});
      for (int64_t g = 0; g < groups_of(w.k); ++g) {
        const int64_t at = g * (kGroup / 2), size = bytes - at < kGroup / 2 ? bytes - at : kGroup / 2;
        const Element* xg[R];
        for (int r = 0; r < R; ++r) xg[r] = x[r] + g * kGroup;
        for (int o = 0; o < outs; o += kOuts) {
          const uint8_t* wg[kOuts];
          for (int j = 0; j < kOuts; ++j) wg[j] = rows[o + j] + at;
          if (size == kGroup / 2) {
            group_tile<R>(xg, wg, kGroup / 2, sums + o);
          } else {
            group_tile<R>(xg, wg, size, sums + o);
          }
        }
        for (int r = 0; r < R; ++r) {
          add_group(sums + r * kPanel, kUnsignedWeights ? extra[r][g] : 0, *scale[r], scales + g * kPanel, outs,
                    values + r * kPanel);
        }
      }
    }
  };

  // to[g * kPanel + j] = the scale of output o + j in group g
  static void turn_scales(const Weight& w, int64_t o, int64_t outs, float* to) {
    const int64_t groups = groups_of(w.k);
    for (int64_t j = 0; j < kPanel; ++j) {
      const float* from = w.scales + (o + (j < outs ? j : outs - 1)) * groups;
      for (int64_t g = 0; g < groups; ++g) to[g * kPanel + j] = from[g];
    }
  }

  static GLM5_INLINE void add_group(const int32_t* sums, int32_t extra, float scale, const float* scales, int outs,
                                    float* values) {
    for (int i = 0; i < outs; i += kLanes) {
      i32v sum;
      std::memcpy(&sum, sums + i, sizeof sum);
      const f32v exact = __builtin_convertvector(sum + extra, f32v);
      store(values + i, load(values + i) + exact * (scale * load(scales + i)));
    }
  }

#if GLM5_LEVEL >= 5
  // 16 outputs at a time: a group of theirs is unpacked into two A tiles and meets every row of the block.
  template <class RowOf, class Emit>
  static void tile_block(const Activations<Int4>& x, RowOf&& row_of, int64_t r0, int64_t r1, const uint8_t* b,
                         const Weight& w, int64_t o0, int64_t o1, Emit&& emit) {
    const int64_t groups = groups_of(w.k), b_size = 2 * groups * kTileSize,
                  row_tiles = (r1 - r0 + kTileHeight - 1) / kTileHeight;
    Scratch scratch;
    float* sums = scratch.take<float>(row_tiles * kTileHeight * kTileHeight);  // [tile, output, row]
    float* scale = scratch.take<float>(row_tiles * kTileHeight);
    for (int64_t j = 0; j < row_tiles * kTileHeight; ++j) scale[j] = x.scale[row_of(r0 + j < r1 ? r0 + j : r1 - 1)];
    alignas(64) uint8_t a[2 * kTileSize];
    alignas(64) int32_t part[kTileHeight * kTileHeight];
    float turned[kTileHeight * kTileHeight];
    const Tiles tiles(kTileHeight);
    for (int64_t o = o0; o < o1; o += kTileHeight) {
      const int64_t outs = o1 - o < kTileHeight ? o1 - o : kTileHeight;
      std::memset(sums, 0, row_tiles * kTileHeight * kTileHeight * sizeof(float));
      for (int64_t g = 0; g < groups; ++g) {
        unpack_group(w, o, outs, g, a);
        GLM5_TILE_LOAD(4, a, 64);
        GLM5_TILE_LOAD(5, a + kTileSize, 64);
        for (int64_t t = 0; t < row_tiles; ++t) {
          const uint8_t* bg = b + t * b_size + 2 * g * kTileSize;
          GLM5_TILE_ZERO(0);
          GLM5_TILE_LOAD(6, bg, 64);
          GLM5_TILE_DOT(0, 4, 6);
          GLM5_TILE_LOAD(7, bg + kTileSize, 64);
          GLM5_TILE_DOT(0, 5, 7);
          GLM5_TILE_STORE(0, part);
          const f32v sx = load(scale + t * kTileHeight);
          float* to = sums + t * kTileHeight * kTileHeight;
          for (int64_t j = 0; j < outs; ++j) {
            const f32v exact = _mm512_cvtepi32_ps(_mm512_load_si512(part + j * kTileHeight));
            store(to + j * kTileHeight, load(to + j * kTileHeight) + exact * (sx * w.scales[(o + j) * groups + g]));
          }
        }
      }
      for (int64_t t = 0; t < row_tiles; ++t) {
        turn_tile(reinterpret_cast<const int32_t*>(sums + t * kTileHeight * kTileHeight),
                  reinterpret_cast<int32_t*>(turned), kTileHeight);
        for (int64_t j = 0; j < kTileHeight && r0 + t * kTileHeight + j < r1; ++j) {
          emit(r0 + t * kTileHeight + j, o, turned + j * kTileHeight, outs);
        }
      }
    }
  }

  // The even and the odd elements of 16 outputs, signed; zeros past the last output.
  static void unpack_group(const Weight& w, int64_t o, int64_t outs, int64_t g, uint8_t* to) {
    const int64_t at = g * (kGroup / 2), size = w.bytes() - at < kGroup / 2 ? w.bytes() - at : kGroup / 2;
    const __m512i low = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8);
    for (int64_t j = 0; j < kTileHeight; ++j) {
      __m512i v = _mm512_setzero_si512();
      if (j < outs) {
        const uint8_t* from = w.values + (o + j) * w.bytes() + at;
        v = size == 64 ? load_w(from) : load_w(from, Part{static_cast<int>(size)});
      }
      v = _mm512_xor_si512(v, _mm512_set1_epi8(static_cast<char>(0x88)));
      _mm512_store_si512(to + 64 * j, _mm512_sub_epi8(_mm512_and_si512(v, low), eight));
      _mm512_store_si512(to + kTileSize + 64 * j,
                         _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(v, 4), low), eight));
    }
  }
#endif
};

}  // namespace glm5::GLM5_LEVEL_NS
