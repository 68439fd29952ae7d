// Scores of the lightning indexer by bf16 products.
//
// Heads lie along the lanes: a product is one chain over ascending pairs of dims; lane l adds iw * relu(product) of
// heads l, l + 16, ... ascending from +0, and the lanes are added in one tree. A key's score depends on its token's q
// and iw and on the key, never on its neighbours.
#pragma once

#include "cpu/gemm_tile.h"
#include "cpu/pairs.h"
#include "cpu/rows/index_score.h"

#if GLM5_LEVEL >= 4

namespace glm5::GLM5_LEVEL_NS {

constexpr int kScoreKeys = 32;  // keys whose products wait together for their sum over the heads

// One token's queries and head weights as the products want them.
struct IndexQuery {
  int64_t blocks, steps;  // blocks of 16 heads, vectors of 32 dims
  __mmask16 last_heads;   // real heads of the last block
  uint32_t* q;            // [blocks][steps * 16][16] pairs
  float* iw;              // [blocks * 16], zeros behind the heads

  static int64_t pair_count(int64_t heads, int64_t dim) { return (heads + 15) / 16 * ((dim + 31) / 32) * 256; }
};

inline IndexQuery index_query(const bf16* q, const float* iw, int64_t heads, int64_t dim, uint32_t* pairs,
                              float* weights) {
  const IndexQuery query{(heads + 15) / 16, (dim + 31) / 32,
                         static_cast<__mmask16>(heads % 16 ? (1u << heads % 16) - 1 : 0xffffu), pairs, weights};
  for (int64_t b = 0; b < query.blocks; ++b) {
    const int64_t here = heads - 16 * b < 16 ? heads - 16 * b : 16;
    pack_columns([&](int64_t h) { return q + (16 * b + h) * dim; }, here, 16, dim, pairs + b * query.steps * 256);
    for (int64_t h = 0; h < 16; ++h) weights[16 * b + h] = h < here ? iw[16 * b + h] : 0.0f;
  }
  return query;
}

// out[i] = sum over the lanes of v[i], in one tree.
GLM5_INLINE f32v sum_lanes16(f32v* v) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    v[i] = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]) + _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = (__m512d)v[2 * i], b = (__m512d)v[2 * i + 1];
    v[i] = (f32v)_mm512_unpacklo_pd(a, b) + (f32v)_mm512_unpackhi_pd(a, b);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    v[i] = _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88) + _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd);
  }
  return _mm512_shuffle_f32x4(v[0], v[1], 0x88) + _mm512_shuffle_f32x4(v[0], v[1], 0xdd);
}

// products: [blocks][kScoreKeys][16 heads]; orders of 16 keys from `at`.
GLM5_INLINE u32v order_of_products(const IndexQuery& query, const float* products, int at) {
  f32v sum[16] = {};
  for (int64_t b = 0; b < query.blocks; ++b) {
    const f32v weight = load(query.iw + 16 * b);
    const __mmask16 heads = b + 1 < query.blocks ? 0xffff : query.last_heads;
    const float* block = products + (b * kScoreKeys + at) * 16;
#pragma GCC unroll 16
    // max returns its second argument for NaN: a NaN product stays one.
    for (int i = 0; i < 16; ++i) sum[i] = fma(weight, _mm512_maskz_max_ps(heads, f32v{}, load(block + i * 16)), sum[i]);
  }
  return to_order(sum_lanes16(sum));
}

#if GLM5_LEVEL >= 5
// 32 keys, rows `stride` bytes apart.
inline void index_products(const IndexQuery& query, const bf16* const* keys, int64_t stride, float* products) {
  const TileRows w[2] = {{reinterpret_cast<const char*>(keys[0]), stride, query.steps, nullptr},
                         {reinterpret_cast<const char*>(keys[16]), stride, query.steps, nullptr}};
  for (int64_t b = 0; b < query.blocks; b += 2) {
    const bool two = b + 1 < query.blocks;
    const uint32_t* q[2] = {query.q + b * query.steps * 256, query.q + (b + 1) * query.steps * 256};
    float* to = products + b * kScoreKeys * 16;
    load_results<2, 2>(to, true, 64);
    two ? tile_steps<2, 2, false>(w, q, 16, 0, query.steps) : tile_steps<2, 1, false>(w, q, 16, 0, query.steps);
    _tile_stored(0, to, 64);
    _tile_stored(2, to + 256, 64);
    if (!two) continue;
    _tile_stored(1, to + kScoreKeys * 16, 64);
    _tile_stored(3, to + kScoreKeys * 16 + 256, 64);
  }
}
#else
template <int K, int B>
inline void index_product_tile(const IndexQuery& query, const bf16* const* keys, int64_t b, int key, float* products) {
  f32v sum[K * B] = {};
  const bf16* row[K];
  for (int k = 0; k < K; ++k) row[k] = keys[key + k];
  const uint32_t* q = query.q + b * query.steps * 256;
  for (int64_t i = 0; i < query.steps * 16; ++i) {
    __m512bh qv[B];
#pragma GCC unroll 8
    for (int j = 0; j < B; ++j) qv[j] = (__m512bh)_mm512_loadu_si512(q + (j * query.steps * 16 + i) * 16);
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) {
      int32_t pair;
      std::memcpy(&pair, row[k] + 2 * i, sizeof pair);
      const __m512bh kv = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
      for (int j = 0; j < B; ++j) sum[k * B + j] = _mm512_dpbf16_ps(sum[k * B + j], kv, qv[j]);
    }
  }
  for (int j = 0; j < B; ++j) {
    for (int k = 0; k < K; ++k) store(products + ((b + j) * kScoreKeys + key + k) * 16, sum[k * B + j]);
  }
}
inline void index_products(const IndexQuery& query, const bf16* const* keys, int64_t, float* products) {
  int64_t b = 0;
  for (; b + 2 <= query.blocks; b += 2) {
    for (int key = 0; key < kScoreKeys; key += 8) index_product_tile<8, 2>(query, keys, b, key, products);
  }
  for (; b < query.blocks; ++b) {
    for (int key = 0; key < kScoreKeys; key += 16) index_product_tile<16, 1>(query, keys, b, key, products);
  }
}
#endif

}  // namespace glm5::GLM5_LEVEL_NS

#endif
