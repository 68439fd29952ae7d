// Scores of the lightning indexer: score(key) = sum over heads, ascending from +0, of iw * relu(q . key).
//
// Keys lie along the lanes: every product is one chain over ascending dims, every score one chain over ascending heads,
// each step an fma. A key's score depends on its token's q and iw and on the key, never on its neighbours.
#pragma once

#include "cpu/transpose.h"
#include "cpu/vec.h"

namespace glm5::GLM5_LEVEL_NS {

#if GLM5_LEVEL >= 2
constexpr int kIndexHeads = 4, kIndexVectors = 4;
#else
constexpr int kIndexHeads = 4, kIndexVectors = 2;
#endif
constexpr int kIndexPanel = kIndexVectors * kLanes;  // keys scored together

// panel[d * kIndexPanel + j] = keys[j][d]; keys past the n real ones repeat the last.
template <class T>
inline void fill_panel(const T* const* keys, int n, int64_t dim, float* panel) {
  for (int j = 0; j < kIndexPanel && j < n; j += kLanes) {
    for_lanes(dim, [&](int64_t d, auto lanes) __attribute__((always_inline)) {
      f32v rows[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) rows[i] = load(keys[j + i < n ? j + i : n - 1] + d, lanes);
      transpose(rows);
      const int real = static_cast<int>(dim - d < kLanes ? dim - d : kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if (i < real) store(panel + (d + i) * kIndexPanel + j, rows[i]);
      }
    });
  }
}

// Adds H heads to the scores of V vectors of keys.
template <int H, int V>
GLM5_INLINE void index_tile(const float* q, const float* iw, int64_t dim, const float* panel, float* scores) {
  f32v sum[H * V] = {};
  for (int64_t d = 0; d < dim; ++d) {
    f32v key[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) key[j] = load(panel + d * kIndexPanel + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < H; ++i) {
      const f32v qv = broadcast(q[i * dim + d]);
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) sum[i * V + j] = fma(qv, key[j], sum[i * V + j]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < V; ++j) {
    f32v score = load(scores + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < H; ++i) {
      // max returns its second argument for NaN: a NaN product stays one.
      score = fma(broadcast(iw[i]), max(f32v{}, sum[i * V + j]), score);
    }
    store(scores + j * kLanes, score);
  }
}

// Order of scores as unsigned integers: larger is better, -0 is +0, NaN is -inf.
GLM5_INLINE u32v to_order(f32v score) {
  const f32v plain = (score == score ? score : broadcast(-__builtin_inff())) + 0.0f;
  return (u32v)plain ^ ((u32v)((i32v)plain >> 31) | 0x80000000u);
}
GLM5_INLINE float from_order(uint32_t order) {
  const uint32_t bits = order & 0x80000000u ? order ^ 0x80000000u : ~order;
  float score;
  std::memcpy(&score, &bits, sizeof score);
  return score;
}

// Orders of the first n keys of a panel for one token: q f32 [heads][dim], iw [heads]. Whole vectors are written.
inline void score_panel(const float* q, const float* iw, int64_t heads, int64_t dim, const float* panel, int n,
                        uint32_t* orders) {
  float scores[kIndexPanel] = {};
  if (n > kIndexPanel - kLanes) {
    int64_t h = 0;
    for (; h + kIndexHeads <= heads; h += kIndexHeads) {
      index_tile<kIndexHeads, kIndexVectors>(q + h * dim, iw + h, dim, panel, scores);
    }
    for (; h < heads; ++h) index_tile<1, kIndexVectors>(q + h * dim, iw + h, dim, panel, scores);
  } else {
    for (int j = 0; j < n; j += kLanes) {
      int64_t h = 0;
      for (; h + kIndexHeads <= heads; h += kIndexHeads) {
        index_tile<kIndexHeads, 1>(q + h * dim, iw + h, dim, panel + j, scores + j);
      }
      for (; h < heads; ++h) index_tile<1, 1>(q + h * dim, iw + h, dim, panel + j, scores + j);
    }
  }
  for (int j = 0; j < n; j += kLanes) {
    const u32v order = to_order(load(scores + j));
    std::memcpy(orders + j, &order, sizeof order);
  }
}

}  // namespace glm5::GLM5_LEVEL_NS
