// Index queries, index key and head weights of a run of tokens: what indexer_project and indexer_preprocess share. They
// differ in where a token's key goes.
#pragma once

#include "cpu/head_tiles.h"
#include "cpu/kernel.h"
#include "cpu/rows/norm.h"
#include "cpu/rows/rope.h"
#include "glm5/paged.h"

namespace glm5::GLM5_LEVEL_NS {

struct IndexProjection {
  const TensorView &hidden, &q_latent, &w_q, &w_k, &k_norm_weight, &k_norm_bias, &w_weights, &positions, &cos_sin;
  bool interleaved;
  float eps;
  const TensorView &iq, &iw;

  // Every value that can be wrong, before anything is written.
  void check(const char* op) const {
    const int64_t rope = cos_sin.dim(1);
    if (rope % 2 != 0 || rope > w_k.dim(0)) {
      fail("%s: R is %lld, needs an even size of at most Di = %lld", op, static_cast<long long>(rope),
           static_cast<long long>(w_k.dim(0)));
    }
    check_range(op, "positions", positions.data<int64_t>(), positions.dim(0), 0, cos_sin.dim(0) - 1);
  }
};

// Rope on the first `rope` values of a row, the others as they are.
template <class T>
GLM5_INLINE void rope_first(const T* x, int64_t dim, int64_t rope, bool interleaved, const float* c, const float* s,
                            T* y) {
  rope_row(x, rope, interleaved, c, s, y);
  std::memcpy(y + rope, x + rope, static_cast<size_t>(dim - rope) * sizeof(T));
}

// One chunk of tokens.
//   put_key(t, buffer, make): calls make(to) where the key of token t (Di values of T) is wanted, if it is; buffer has
//   space for a key.
template <class T, class PutKey>
void project_index_chunk(const IndexProjection& a, int64_t first, int64_t tokens, PutKey&& put_key) {
  const int64_t n = a.hidden.dim(1), q_rank = a.q_latent.dim(1), dim = a.w_k.dim(0), heads = a.w_weights.dim(0);
  const int64_t rope = a.cos_sin.dim(1);
  const T *hidden = a.hidden.data<T>() + first * n, *w_k = a.w_k.data<T>(), *w_weights = a.w_weights.data<T>();
  const T *norm = a.k_norm_weight.data<T>(), *shift = a.k_norm_bias.data<T>();
  const int64_t* positions = a.positions.data<int64_t>() + first;
  const float* table = a.cos_sin.data<float>();
  T* iq = a.iq.out<T>() + first * heads * dim;
  float* iw = a.iw.out<float>() + first * heads;
  const float eps = a.eps;
  const bool interleaved = a.interleaved;
  const f32v scale = broadcast(static_cast<float>(__builtin_pow(static_cast<double>(heads), -0.5) *
                                                  __builtin_pow(static_cast<double>(dim), -0.5)));

  Scratch scratch;
  T* raw = scratch.take<T>(tokens * dim);
  float* factors = scratch.take<float>(tokens * 2 * rope);
  gemm(
      tokens, dim + heads, n, [=](int64_t t) { return hidden + t * n; },
      [=](int64_t o) { return o < dim ? w_k + o * n : w_weights + (o - dim) * n; },
      [=](int64_t t, int64_t o, const float* values, int64_t count) {
        const int64_t keys = o >= dim ? 0 : dim - o < count ? dim - o : count;
        store_values(raw + t * dim + o, values, keys);
        float* to = iw + t * heads + (o + keys - dim);
        for_lanes(count - keys, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
          store(to + i, load(values + keys + i, lanes) * scale, lanes);
        });
      });

  parallel_for(tokens, rows_per_range(2 * dim), [&](int64_t begin, int64_t end) {
    Scratch own;
    T *buffer = own.take<T>(dim), *normed = own.take<T>(dim);
    for (int64_t t = begin; t < end; ++t) {
      float *c = factors + t * 2 * rope, *s = c + rope;
      rope_factors(table + positions[t] * rope, rope, interleaved, c, s);
      put_key(first + t, buffer, [&](T* to) {
        layer_norm_row(static_cast<const T*>(raw + t * dim), norm, shift, dim, eps, normed);
        rope_first(static_cast<const T*>(normed), dim, rope, interleaved, c, s, to);
      });
    }
  });

  gemm_heads(a.q_latent.data<T>() + first * q_rank, a.w_q.data<T>(), tokens, heads, dim, q_rank,
             [=](int64_t h, int64_t r0, int64_t r1, const T* from, int64_t stride) {
               for (int64_t t = r0; t < r1; ++t) {
                 const float *c = factors + t * 2 * rope, *s = c + rope;
                 rope_first(from + (t - r0) * stride, dim, rope, interleaved, c, s, iq + (t * heads + h) * dim);
               }
             });
}

template <class T, class PutKey>
void project_index(const IndexProjection& a, PutKey&& put_key) {
  const int64_t tokens = a.hidden.dim(0), row_bytes = a.w_k.dim(0) * static_cast<int64_t>(sizeof(T));
  const int64_t chunk = projection_chunk(tokens, row_bytes + 8 * a.cos_sin.dim(1));
  for (int64_t t = 0; t < tokens; t += chunk) {
    project_index_chunk<T>(a, t, tokens - t < chunk ? tokens - t : chunk, put_key);
  }
}

}  // namespace glm5::GLM5_LEVEL_NS
