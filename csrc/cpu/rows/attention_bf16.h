// Softmax attention of some heads of one token over bf16 keys, a block of 128 at a time, by bf16 products.
//
// A score adds its pairs of the row ascending, in one chain; p is rounded to bf16 for the value product, where each
// output adds the block's pairs of keys ascending to what it was; the sum of p takes p unrounded, four chains of a
// block's keys. So the bits of a head depend on its token's list of keys, and not on the heads beside it.
//
// Heads lie along the lanes for scores and softmax, columns of values for the output.
#pragma once

#include "cpu/gemm_tile.h"
#include "cpu/pairs.h"
#include "cpu/vec_math.h"

#if GLM5_LEVEL >= 4

namespace glm5::GLM5_LEVEL_NS {

constexpr int kBlockKeys = 128;  // outputs travel to the second-level cache and back once a block

// The rows of the next block, asked for a few cache lines at a time: more at once than a core can wait for would hold
// up the work that they are to hide under.
struct RowsAhead {
  const bf16* row[kBlockKeys];
  int count;
  int64_t bytes;
  int asked = 0;
  int64_t at = 0;

  GLM5_INLINE void ask(int64_t lines) {
    for (; lines > 0 && asked < count; --lines) {
      __builtin_prefetch(reinterpret_cast<const char*>(row[asked]) + at, 0, 2);
      at += 64;
      if (at >= bytes) at = 0, ++asked;
    }
  }
  GLM5_INLINE int64_t lines_left() const { return (count - asked) * ((bytes + 63) / 64); }
};

struct Bf16Heads {
  int64_t heads, blocks;           // of this group; blocks of 16 heads, the last filled with zero queries
  int64_t row, values;             // C + R, C
  int64_t steps, columns, stride;  // vectors of 32 in a row; columns of values in whole vectors of 32; padded columns
  float scale;
  uint32_t* q;      // [blocks][steps * 16][16] pairs
  bf16* keys;       // [128][steps * 32]
  uint32_t* pairs;  // [64][stride]: keys 2i and 2i + 1, columns in zipped order
  float* s;         // [blocks][128][16] scores, then p
  bf16* p;          // [blocks * 16][128]
  float* o;         // [blocks * 16][stride], zipped order
  float *m, *l;     // [blocks * 16] largest score so far, sum of p so far

  Bf16Heads(Scratch& scratch, int64_t most_heads, int64_t row_, int64_t values_, float scale_)
      : heads(0),
        blocks(0),
        row(row_),
        values(values_),
        steps((row_ + 31) / 32),
        columns((values_ + 31) / 32 * 32),
        stride(columns + 16),
        scale(scale_) {
    const int64_t most = (most_heads + 15) / 16;
    q = scratch.take<uint32_t>(most * steps * 256);
    keys = scratch.take<bf16>(kBlockKeys * steps * 32);
    pairs = scratch.take<uint32_t>(kBlockKeys / 2 * stride);
    s = scratch.take<float>(most * kBlockKeys * 16);
    p = scratch.take<bf16>(most * 16 * kBlockKeys);
    o = scratch.take<float>(most * 16 * stride);
    m = scratch.take<float>(most * 16);
    l = scratch.take<float>(most * 16);
  }
};

inline void begin_bf16_heads(Bf16Heads& g, const bf16* q, int64_t heads) {
  g.heads = heads;
  g.blocks = (heads + 15) / 16;
  for (int64_t b = 0; b < g.blocks; ++b) {
    const int64_t here = heads - 16 * b < 16 ? heads - 16 * b : 16;
    pack_columns([&](int64_t h) { return q + (16 * b + h) * g.row; }, here, 16, g.row, g.q + b * g.steps * 256);
    store(g.m + 16 * b, broadcast(-__builtin_inff()));
    store(g.l + 16 * b, f32v{});
  }
}

// Copies n keys, zeros behind them, and zips neighbours: of each 32 columns, the low halves of the four lanes of
// 128 bits come first, then the high halves. finish_bf16_heads() brings outputs back in order.
inline void load_bf16_keys(const Bf16Heads& g, const bf16* const* key, int n, RowsAhead& ahead) {
  const int64_t width = g.steps * 32, whole = g.row / 32 * 32;
  for (int j = 0; j < kBlockKeys; j += 2) {
    bf16 *even = g.keys + j * width, *odd = even + width;
    const bf16 *a = j < n ? key[j] : even, *b = j + 1 < n ? key[j + 1] : odd;
    uint32_t* zipped = g.pairs + j / 2 * g.stride;
    auto put = [&](int64_t i, __m512i x, __m512i y) __attribute__((always_inline)) {
      ahead.ask(1);
      _mm512_store_si512(even + i, x);
      _mm512_store_si512(odd + i, y);
      if (i >= g.columns) return;
      _mm512_storeu_si512(zipped + i, _mm512_unpacklo_epi16(x, y));
      _mm512_storeu_si512(zipped + i + 16, _mm512_unpackhi_epi16(x, y));
    };
    if (j + 1 < n) {
      for (int64_t i = 0; i < whole; i += 32) put(i, _mm512_loadu_si512(a + i), _mm512_loadu_si512(b + i));
    }
    for (int64_t i = j + 1 < n ? whole : 0; i < width; i += 32) {
      const __mmask32 real = first_elements(g.row - i);
      put(i, _mm512_maskz_loadu_epi16(j < n ? real : 0, a + i), _mm512_maskz_loadu_epi16(j + 1 < n ? real : 0, b + i));
    }
  }
}

#if GLM5_LEVEL >= 5
inline void score_products(const Bf16Heads& g, int n) {
  const int64_t width = g.steps * 64;
  for (int64_t b = 0; b < g.blocks; b += 2) {
    const bool two = b + 1 < g.blocks;
    const uint32_t* q[2] = {g.q + b * g.steps * 256, g.q + (b + 1) * g.steps * 256};
    for (int k = 0; k < n; k += 32) {
      const char* rows = reinterpret_cast<const char*>(g.keys) + k * width;
      const TileRows w[2] = {{rows, width, g.steps, nullptr}, {rows + 16 * width, width, g.steps, nullptr}};
      float* s = g.s + (b * kBlockKeys + k) * 16;
      load_results<2, 2>(s, true, 64);
      two ? tile_steps<2, 2, false>(w, q, 16, 0, g.steps) : tile_steps<2, 1, false>(w, q, 16, 0, g.steps);
      _tile_stored(0, s, 64);
      _tile_stored(2, s + 256, 64);
      if (!two) continue;
      _tile_stored(1, s + kBlockKeys * 16, 64);
      _tile_stored(3, s + kBlockKeys * 16 + 256, 64);
    }
  }
}

inline void value_products(const Bf16Heads& g, int n, bool first, RowsAhead& ahead) {
  const int64_t o_row = g.stride * 4, products = g.columns / 32 * ((g.blocks + 1) / 2) * ((n + 31) / 32);
  const int64_t share = ahead.lines_left() / products + 1;
  for (int64_t c = 0; c < g.columns; c += 32) {
    for (int64_t b = 0; b < g.blocks; b += 2) {
      const bool two = b + 1 < g.blocks;
      const bf16* p = g.p + b * 16 * kBlockKeys;
      float* o = g.o + b * 16 * g.stride + c;
      if (two) {
        load_results<2, 2>(o, first, o_row, 16, 16 * g.stride);
      } else {
        load_results<1, 2>(o, first, o_row, 16);
      }
      for (int k = 0; k < n; k += 32) {
        ahead.ask(share);
        const uint32_t* v = g.pairs + k / 2 * g.stride + c;
        _tile_loadd(6, v, o_row);
        _tile_loadd(7, v + 16, o_row);
        _tile_loadd(4, p + k, 2 * kBlockKeys);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
          _tile_loadd(5, p + 16 * kBlockKeys + k, 2 * kBlockKeys);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      if (two) {
        store_results<2, 2>(o, o_row, 16, 16 * g.stride);
      } else {
        store_results<1, 2>(o, o_row, 16);
      }
    }
  }
}
#else
GLM5_INLINE __m512bh broadcast_pair(const void* pair) {
  int32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return (__m512bh)_mm512_set1_epi32(bits);
}
GLM5_INLINE __m512bh load_zipped(const uint32_t* p) {
  return (__m512bh)_mm512_loadu_si512(p);
}

// Scores of K keys from `key` and B blocks of heads from `b`.
template <int K, int B>
inline void score_tile(const Bf16Heads& g, int64_t b, int key) {
  f32v sum[K * B] = {};
  const bf16* keys = g.keys + key * g.steps * 32;
  const uint32_t* q = g.q + b * g.steps * 256;
  for (int64_t i = 0; i < g.steps * 16; ++i) {
    __m512bh qv[B];
#pragma GCC unroll 8
    for (int j = 0; j < B; ++j) qv[j] = load_zipped(q + (j * g.steps * 16 + i) * 16);
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) {
      const __m512bh kv = broadcast_pair(keys + k * g.steps * 32 + 2 * i);
#pragma GCC unroll 8
      for (int j = 0; j < B; ++j) sum[k * B + j] = _mm512_dpbf16_ps(sum[k * B + j], kv, qv[j]);
    }
  }
  for (int j = 0; j < B; ++j) {
    for (int k = 0; k < K; ++k) store(g.s + ((b + j) * kBlockKeys + key + k) * 16, sum[k * B + j]);
  }
}
template <int K, int B>
inline void score_keys(const Bf16Heads& g, int64_t b) {
  int key = 0;
  for (; key + K <= kBlockKeys; key += K) score_tile<K, B>(g, b, key);
  static_assert(kBlockKeys % K % 2 == 0, "what is left is whole pairs");
  for (; key < kBlockKeys; key += 2) score_tile<2, B>(g, b, key);
}
inline void score_products(const Bf16Heads& g, int) {
  int64_t b = 0;
  for (; b + 4 <= g.blocks; b += 4) score_keys<6, 4>(g, b);
  for (; b + 2 <= g.blocks; b += 2) score_keys<12, 2>(g, b);
  for (; b < g.blocks; ++b) score_keys<16, 1>(g, b);
}

// o += p v for H heads and V vectors of columns.
template <int H, int V>
inline void value_tile(const Bf16Heads& g, int64_t h, int64_t c, bool first) {
  f32v sum[H * V];
  float* o = g.o + h * g.stride + c;
  for (int i = 0; i < H; ++i) {
    for (int j = 0; j < V; ++j) sum[i * V + j] = first ? f32v{} : load(o + i * g.stride + j * 16);
  }
  for (int k = 0; k < kBlockKeys / 2; ++k) {
    __m512bh v[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) v[j] = load_zipped(g.pairs + k * g.stride + c + j * 16);
#pragma GCC unroll 8
    for (int i = 0; i < H; ++i) {
      const __m512bh p = broadcast_pair(g.p + (h + i) * kBlockKeys + 2 * k);
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) sum[i * V + j] = _mm512_dpbf16_ps(sum[i * V + j], p, v[j]);
    }
  }
  for (int i = 0; i < H; ++i) {
    for (int j = 0; j < V; ++j) store(o + i * g.stride + j * 16, sum[i * V + j]);
  }
}
template <int V>
inline void value_columns(const Bf16Heads& g, int64_t c, bool first) {
  int64_t h = 0;
  for (; h + 6 <= g.heads; h += 6) value_tile<6, V>(g, h, c, first);
  for (; h + 2 <= g.heads; h += 2) value_tile<2, V>(g, h, c, first);
  for (; h < g.heads; ++h) value_tile<1, V>(g, h, c, first);
}
inline void value_products(const Bf16Heads& g, int, bool first, RowsAhead& ahead) {
  const int64_t share = ahead.lines_left() * 64 / g.columns + 1;
  int64_t c = 0;
  for (; c + 64 <= g.columns; c += 64) value_columns<4>(g, c, first), ahead.ask(share);
  for (; c < g.columns; c += 32) value_columns<2>(g, c, first);
}
#endif

// Scores of n keys become p; m, l and what o holds move on.
inline void softmax_bf16(const Bf16Heads& g, int n, bool first) {
  const f32v scale = broadcast(g.scale);
  for (int64_t b = 0; b < g.blocks; ++b) {
    float* s = g.s + b * kBlockKeys * 16;
    f32v most[4];
    for (auto& v : most) v = broadcast(-__builtin_inff());
    for (int k = 0; k < n; ++k) {
      const f32v score = load(s + k * 16) * scale;
      store(s + k * 16, score);
      most[k % 4] = max(score, most[k % 4]);
    }
    const f32v before = load(g.m + 16 * b);
    const f32v m = max(max(max(most[0], most[1]), max(most[2], most[3])), before);
    store(g.m + 16 * b, m);
    f32v sum[4] = {};
    for (int k = 0; k < kBlockKeys; k += 16) {
      f32v p[16];
      for (int i = 0; i < 16; ++i) {
        p[i] = k + i < n ? exp(load(s + (k + i) * 16) - m) : f32v{};
        sum[i % 4] = sum[i % 4] + p[i];
      }
      transpose(p);
      for (int h = 0; h < 16; ++h) {
        const __m256bh rounded = _mm512_cvtneps_pbh(p[h]);
        std::memcpy(g.p + (b * 16 + h) * kBlockKeys + k, &rounded, sizeof rounded);
      }
    }
    const f32v alpha = exp(before - m);
    store(g.l + 16 * b, load(g.l + 16 * b) * alpha + ((sum[0] + sum[1]) + (sum[2] + sum[3])));
    if (first) continue;
    for (int h = 0; h < 16; ++h) {
      if (alpha[h] == 1.0f) continue;  // the product changes nothing
      float* o = g.o + (16 * b + h) * g.stride;
      const f32v factor = broadcast(alpha[h]);
      for (int64_t c = 0; c < g.columns; c += 16) store(o + c, load(o + c) * factor);
    }
  }
}

// The next block of a token's keys; n = kBlockKeys but for the last.
inline void attend_bf16_block(const Bf16Heads& g, const bf16* const* key, int n, bool first, RowsAhead& ahead) {
  load_bf16_keys(g, key, n, ahead);
  score_products(g, n);
  softmax_bf16(g, n, first);
  value_products(g, n, first, ahead);
  ahead.ask(ahead.lines_left());
}

inline void finish_bf16_heads(const Bf16Heads& g, bf16* out, float* lse) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int64_t h = 0; h < g.heads; ++h) {
    const f32v l = broadcast(g.l[h]);
    for (int64_t c = 0; c < g.columns; c += 32) {
      const f32v a = load(g.o + h * g.stride + c), b = load(g.o + h * g.stride + c + 16);
      for_lanes(g.values - c < 16 ? g.values - c : 16, [&](int64_t, auto lanes) __attribute__((always_inline)) {
        store(out + h * g.values + c, (f32v)_mm512_permutex2var_ps(a, low, b) / l, lanes);
      });
      if (g.values - c <= 16) continue;
      for_lanes(g.values - c < 32 ? g.values - c - 16 : 16, [&](int64_t, auto lanes) __attribute__((always_inline)) {
        store(out + h * g.values + c + 16, (f32v)_mm512_permutex2var_ps(a, high, b) / l, lanes);
      });
    }
    lse[h] = static_cast<float>(g.m[h] + log_of(g.l[h]));
  }
}

}  // namespace glm5::GLM5_LEVEL_NS

#endif
