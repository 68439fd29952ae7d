// fp8: e4m3 weights in blocks of 128 x 128 times e4m3 tokens in groups of 128, multiplied in f32.
//
// Each output owns kLanes chains: a group's products are summed by lane, ascending, then that sum times (sx * sw) is
// added to the lane's chain over the groups; one fixed tree over the lanes at the end. The order depends on k and the
// level alone.
#pragma once

#include "cpu/int8_dot.h"
#include "cpu/quant_gemm.h"

namespace glm5::GLM5_LEVEL_NS {

struct Fp8 {
  using Element = float;  // the value of a code, exact
  static constexpr bool kTiles = false;
#if GLM5_LEVEL >= 2
  static constexpr int kRows = 3, kOuts = 4;  // accumulators of a register tile, twice
#else
  static constexpr int kRows = 1, kOuts = 4;
#endif

  struct Weight {
    const uint8_t* values;  // [outs, k]
    const float* scales;    // [ceil(outs / 128), groups]
    int64_t outs, k;

    Weight at(int64_t e) const { return {values + e * outs * k, scales + e * groups_of(outs) * groups_of(k), outs, k}; }
  };

  static int64_t padded(int64_t k) { return (k + 15) / 16 * 16; }
  static int64_t scales_per_row(int64_t k) { return groups_of(k); }
  static int64_t extras_per_row(int64_t) { return 0; }

  template <class T>
  static void quantise(const T* x, int64_t k, Element* q, float* scale, int32_t*) {
    uint8_t codes[kGroup];
    for (int64_t g = 0; g < groups_of(k); ++g) {
      const int64_t first = g * kGroup, n = k - first < kGroup ? k - first : kGroup;
      scale[g] = quantise_fp8(x + first, n, codes);
      dequantise_fp8(codes, n, 1.0f, q + first);
    }
  }

  template <class W>
  static GLM5_INLINE f32v value(const W* w, int64_t i, Full lanes) {
    if constexpr (sizeof(W) == 1) {
      return from_fp8(load_bytes(w + i, lanes));
    } else {
      return load(w + i, lanes);
    }
  }
  template <class W>
  static GLM5_INLINE f32v value(const W* w, int64_t i, Part lanes) {
    if constexpr (sizeof(W) == 1) {
      return from_fp8(load_bytes(w + i, lanes));
    } else {
      return load(w + i, lanes);
    }
  }

  // out[r * kOuts + o]; sw: the scales of each output's blocks.
  template <int R, class W>
  static inline void tile(const Element* const* x, const float* const* sx, const W* const* w, const float* const* sw,
                          int64_t k, float* out) {
    f32v total[R * kOuts] = {};
    for (int64_t g = 0; g < groups_of(k); ++g) {
      const int64_t first = g * kGroup, n = k - first < kGroup ? k - first : kGroup;
      f32v sum[R * kOuts] = {};
      for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
        f32v xv[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) xv[r] = load(x[r] + first + i, lanes);
#pragma GCC unroll 4
        for (int o = 0; o < kOuts; ++o) {
          const f32v wv = value(w[o], first + i, lanes);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) sum[r * kOuts + o] = fma(xv[r], wv, sum[r * kOuts + o]);
        }
      });
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int o = 0; o < kOuts; ++o) {
          total[r * kOuts + o] = fma(sum[r * kOuts + o], broadcast(sx[r][g] * sw[o][g]), total[r * kOuts + o]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const f32v* t = total + r * kOuts;
      reduce_add4(t[0], t[1], t[2], t[3], out + r * kOuts);
    }
  }

  struct Panel {
    const Weight& w;
    bool widened;  // few rows read a weight once or twice: widening it first would only add traffic
    Scratch scratch;
    float* wide;
    int64_t stride, first = 0;
    int outs = 0;

    Panel(const Weight& weight, int64_t rows)
        : w(weight), widened(rows > 2 * kRows), wide(nullptr), stride(padded(weight.k) + 16) {
      if (widened) wide = scratch.take<float>(kPanel * stride);
    }
    void open(int64_t o, int count) {
      first = o, outs = count;
      if (!widened) return;
      for (int64_t j = 0; j < outs; ++j) dequantise_fp8(w.values + (o + j) * w.k, w.k, 1.0f, wide + j * stride);
    }

    template <int R>
    void strip(const Element* const* x, const float* const* scale, const int32_t* const*, float* values) const {
      float out[R * kOuts];
      for (int o = 0; o < outs; o += kOuts) {
        const uint8_t* codes[kOuts];
        const float *rows[kOuts], *sw[kOuts];
        for (int j = 0; j < kOuts; ++j) {
          // Outputs past the last repeat it; nobody reads what they give.
          const int64_t at = o + j < outs ? o + j : outs - 1;
          codes[j] = w.values + (first + at) * w.k;
          rows[j] = wide + at * stride;
          sw[j] = w.scales + (first + at) / kGroup * groups_of(w.k);
        }
        if (widened) {
          tile<R>(x, scale, rows, sw, w.k, out);
        } else {
          tile<R>(x, scale, codes, sw, w.k, out);
        }
        for (int r = 0; r < R; ++r) std::memcpy(values + r * kPanel + o, out + r * kOuts, sizeof(float) * kOuts);
      }
    }
  };
};

}  // namespace glm5::GLM5_LEVEL_NS
