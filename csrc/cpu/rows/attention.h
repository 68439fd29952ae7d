// Softmax attention of some heads of one token over keys that those heads share, a block at a time.
//
// Every score, sum and output element has an order of its own, fixed by the token's list of keys: a score is kLanes
// chains along the row (lane l adds l, l + kLanes, ... with one fma each, a masked tail) and one tree over the lanes;
// the sum of p goes over blocks of 64 keys counted from the first, an output over ascending keys. Which heads share a
// call, and how tiles cut heads and columns, only chooses what is computed together.
#pragma once

#include "cpu/gemm_tile.h"
#include "cpu/vec_math.h"

namespace glm5::GLM5_LEVEL_NS {

constexpr int kKeyBlock = 64;
static_assert(kKeyBlock % kLanes == 0, "a block of scores is whole vectors");

// Register tiles: heads by keys for the scores, heads by vectors of columns for the weighted sum of values.
#if GLM5_LEVEL >= 2
constexpr int kScoreHeads = 4, kScoreKeys = 6;
constexpr int kValueHeads = 4, kValueVectors = 4;
#else
constexpr int kScoreHeads = GLM5_LEVEL == 1 ? 3 : 2, kScoreKeys = 4;
constexpr int kValueHeads = 4, kValueVectors = 2;
#endif

struct HeadGroup {
  int64_t heads, row, values;  // heads of this group, C + R, C
  int64_t q_stride, o_stride;
  float scale;
  float *q, *o;          // [heads][row] queries; [heads][values] sum of p * v so far
  float* p;              // [heads][kKeyBlock] scores of a block, then its p
  float *m, *l, *alpha;  // [heads] largest score so far, sum of p so far, factor from the old m to the new

  GLM5_INLINE HeadGroup(Scratch& scratch, int64_t most_heads, int64_t row_, int64_t values_, float scale_)
      : heads(0), row(row_), values(values_), q_stride(padded_row(row_)), o_stride(padded_row(values_)), scale(scale_) {
    q = scratch.take<float>(most_heads * q_stride);
    o = scratch.take<float>(most_heads * o_stride);
    p = scratch.take<float>(most_heads * kKeyBlock);
    m = scratch.take<float>(most_heads);
    l = scratch.take<float>(most_heads);
    alpha = scratch.take<float>(most_heads);
  }
};

template <class T>
GLM5_INLINE void begin_heads(HeadGroup& g, const T* q, int64_t heads) {
  g.heads = heads;
  for (int64_t h = 0; h < heads; ++h) {
    widen_row(q + h * g.row, g.row, g.q + h * g.q_stride);
    std::memset(g.o + h * g.o_stride, 0, static_cast<size_t>(g.values) * sizeof(float));
    g.m[h] = -__builtin_inff();
    g.l[h] = 0.0f;
  }
}

// Scores of R heads and O keys, `at` of the block onwards.
template <int R, int O>
GLM5_INLINE void score_tile(const HeadGroup& g, int64_t h, const float* const* keys, int at) {
  f32v sum[R * O] = {};
  const float *x[R], *w[O];
  for (int r = 0; r < R; ++r) x[r] = g.q + (h + r) * g.q_stride;
  for (int o = 0; o < O; ++o) w[o] = keys[at + o];
  for_lanes(g.row, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    f32v xv[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) xv[r] = load(x[r] + i, lanes);
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) {
      const f32v wv = load(w[o] + i, lanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r * O + o] = fma(xv[r], wv, sum[r * O + o]);
    }
  });
  float scores[R * O];
  int j = 0;
#pragma GCC unroll 8
  for (; j + 4 <= R * O; j += 4) reduce_add4(sum[j], sum[j + 1], sum[j + 2], sum[j + 3], scores + j);
#pragma GCC unroll 4
  for (; j < R * O; ++j) scores[j] = reduce_add(sum[j]);
  for (int r = 0; r < R; ++r) {
    for (int o = 0; o < O; ++o) g.p[(h + r) * kKeyBlock + at + o] = scores[r * O + o] * g.scale;
  }
}
// A few keys stay close while all heads pass by.
template <int O>
inline void score_keys(const HeadGroup& g, const float* const* keys, int at) {
  int64_t h = 0;
  for (; h + kScoreHeads <= g.heads; h += kScoreHeads) score_tile<kScoreHeads, O>(g, h, keys, at);
  if constexpr (kScoreHeads > 2) {
    for (; h + 2 <= g.heads; h += 2) score_tile<2, O>(g, h, keys, at);
  }
  for (; h < g.heads; ++h) score_tile<1, O>(g, h, keys, at);
}

// Scores of a block of n keys become p = exp(score - m); m and l move on.
inline void softmax_block(const HeadGroup& g, int n) {
  for (int64_t h = 0; h < g.heads; ++h) {
    float* p = g.p + h * kKeyBlock;
    for (int k = n; k < kKeyBlock; ++k) p[k] = -__builtin_inff();
    f32v most = load(p);
    for (int k = kLanes; k < kKeyBlock; k += kLanes) most = max(most, load(p + k));
    const float block = reduce_max(most);
    g.alpha[h] = g.m[h];
    if (block > g.m[h]) g.m[h] = block;
  }
  for_lanes(g.heads, [&](int64_t h, auto lanes) __attribute__((always_inline)) {
    store(g.alpha + h, exp(load(g.alpha + h, lanes) - load(g.m + h, lanes)), lanes);
  });
  for (int64_t h = 0; h < g.heads; ++h) {
    float* p = g.p + h * kKeyBlock;
    const f32v m = broadcast(g.m[h]);
    f32v sum{};
    for (int k = 0; k < kKeyBlock; k += kLanes) {
      const f32v v = exp(load(p + k) - m);
      store(p + k, v);
      sum = sum + v;
    }
    g.l[h] = g.l[h] * g.alpha[h] + reduce_add(sum);
  }
}

// o = o * alpha + sum over the block's n keys of p * v, for H heads and V vectors of columns.
template <int H, int V, class Lanes>
GLM5_INLINE void value_tile(const HeadGroup& g, int64_t h, int64_t c, const float* const* keys, int n, Lanes lanes) {
  f32v sum[H * V];
  const float* p = g.p + h * kKeyBlock;
  float* o = g.o + h * g.o_stride + c;
#pragma GCC unroll 8
  for (int i = 0; i < H; ++i) {
    const f32v alpha = broadcast(g.alpha[h + i]);
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) sum[i * V + j] = load(o + i * g.o_stride + j * kLanes, lanes) * alpha;
  }
  for (int k = 0; k < n; ++k) {
    const float* v = keys[k] + c;
    f32v vv[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) vv[j] = load(v + j * kLanes, lanes);
#pragma GCC unroll 8
    for (int i = 0; i < H; ++i) {
      const f32v pv = broadcast(p[i * kKeyBlock + k]);
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) sum[i * V + j] = fma(pv, vv[j], sum[i * V + j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < H; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) store(o + i * g.o_stride + j * kLanes, sum[i * V + j], lanes);
  }
}
template <int V, class Lanes>
inline void value_columns(const HeadGroup& g, int64_t c, const float* const* keys, int n, Lanes lanes) {
  int64_t h = 0;
  for (; h + kValueHeads <= g.heads; h += kValueHeads) value_tile<kValueHeads, V>(g, h, c, keys, n, lanes);
  for (; h < g.heads; ++h) value_tile<1, V>(g, h, c, keys, n, lanes);
}

// The next block of a token's keys: n rows of C + R values, n = kKeyBlock but for the last block.
inline void attend_block(const HeadGroup& g, const float* const* keys, int n) {
  int at = 0;
  for (; at + kScoreKeys <= n; at += kScoreKeys) score_keys<kScoreKeys>(g, keys, at);
  for (; at + 2 <= n; at += 2) score_keys<2>(g, keys, at);
  for (; at < n; ++at) score_keys<1>(g, keys, at);
  softmax_block(g, n);
  int64_t c = 0;
  for (; c + kValueVectors * kLanes <= g.values; c += kValueVectors * kLanes) {
    value_columns<kValueVectors>(g, c, keys, n, Full{});
  }
  for_lanes(g.values - c,
            [&](int64_t i, auto lanes) __attribute__((always_inline)) { value_columns<1>(g, c + i, keys, n, lanes); });
}

template <class T>
GLM5_INLINE void finish_heads(const HeadGroup& g, T* out, float* lse) {
  for (int64_t h = 0; h < g.heads; ++h) {
    const f32v l = broadcast(g.l[h]);
    for_lanes(g.values, [&](int64_t c, auto lanes) __attribute__((always_inline)) {
      store(out + h * g.values + c, load(g.o + h * g.o_stride + c, lanes) / l, lanes);
    });
    lse[h] = static_cast<float>(g.m[h] + log_of(g.l[h]));
  }
}

template <class T>
GLM5_INLINE void finish_empty_heads(int64_t heads, int64_t values, T* out, float* lse) {
  for_lanes(heads * values,
            [&](int64_t i, auto lanes) __attribute__((always_inline)) { store(out + i, f32v{}, lanes); });
  for (int64_t h = 0; h < heads; ++h) lse[h] = -__builtin_inff();
}

}  // namespace glm5::GLM5_LEVEL_NS
