// Everything before attention for a run of tokens: what mla_project and mla_preprocess share. They differ in where a
// token's cache row goes.
#pragma once

#include "cpu/head_tiles.h"
#include "cpu/kernel.h"
#include "cpu/rows/norm.h"
#include "cpu/rows/rope.h"
#include "glm5/paged.h"

namespace glm5::GLM5_LEVEL_NS {

struct LatentProjection {
  const TensorView &hidden, &w_q_a, &q_a_norm, &w_q_b, &w_kv_a, &kv_a_norm, &w_uk, &positions, &cos_sin;
  float eps;
  bool interleaved;
  const TensorView &q, &q_latent;

  GLM5_INLINE int64_t latent() const { return w_uk.dim(1); }
  GLM5_INLINE int64_t rope() const { return cos_sin.dim(1); }
  GLM5_INLINE int64_t row() const { return latent() + rope(); }

  // Every value that can be wrong, before anything is written.
  void check(const char* op) const {
    if (rope() % 2 != 0) {
      fail("%s: R is %lld, needs an even size: rope rotates pairs", op, static_cast<long long>(rope()));
    }
    check_range(op, "positions", positions.data<int64_t>(), positions.dim(0), 0, cos_sin.dim(0) - 1);
  }
};

// One chunk of tokens. Tensors start at its first token.
//   put_row(t, buffer, make): calls make(to) where the row of token t (C + R values of T) is wanted, if it is; buffer
//   has space for a row.
template <class T, class PutRow>
void project_chunk(const LatentProjection& a, int64_t first, int64_t tokens, PutRow&& put_row) {
  const int64_t n = a.w_q_a.dim(1), q_rank = a.w_q_a.dim(0), latent = a.latent(), rope = a.rope(), row = a.row();
  const int64_t heads = a.w_uk.dim(0), nope = a.w_uk.dim(2), raw_row = q_rank + row;
  const T *hidden = a.hidden.data<T>() + first * n, *w_q_a = a.w_q_a.data<T>(), *w_kv_a = a.w_kv_a.data<T>();
  const T *q_norm = a.q_a_norm.data<T>(), *kv_norm = a.kv_a_norm.data<T>(), *w_uk = a.w_uk.data<T>();
  const int64_t* positions = a.positions.data<int64_t>() + first;
  const float* table = a.cos_sin.data<float>();
  T *q = a.q.out<T>() + first * heads * row, *q_latent = a.q_latent.out<T>() + first * q_rank;
  const float eps = a.eps;
  const bool interleaved = a.interleaved;

  Scratch scratch;
  T* raw = scratch.take<T>(tokens * raw_row);
  float* factors = scratch.take<float>(tokens * 2 * rope);
  gemm(
      tokens, raw_row, n, [=](int64_t t) { return hidden + t * n; },
      [=](int64_t o) { return o < q_rank ? w_q_a + o * n : w_kv_a + (o - q_rank) * n; },
      [=](int64_t t, int64_t o, const float* values, int64_t count) {
        store_values(raw + t * raw_row + o, values, count);
      });

  parallel_for(tokens, rows_per_range(raw_row), [&](int64_t begin, int64_t end) {
    Scratch own;
    T* buffer = own.take<T>(row);
    for (int64_t t = begin; t < end; ++t) {
      const T* kv = raw + t * raw_row + q_rank;
      float *c = factors + t * 2 * rope, *s = c + rope;
      rms_norm_row(raw + t * raw_row, q_norm, q_rank, eps, q_latent + t * q_rank);
      rope_factors(table + positions[t] * rope, rope, interleaved, c, s);
      put_row(first + t, buffer, [&](T* to) {
        rms_norm_row(kv, kv_norm, latent, eps, to);
        rope_row(kv + latent, rope, interleaved, c, s, to + latent);
      });
    }
  });

  gemm_heads(static_cast<const T*>(q_latent), a.w_q_b.data<T>(), tokens, heads, nope + rope, q_rank,
             [=](int64_t h, int64_t r0, int64_t r1, const T* from, int64_t stride) {
               for (int64_t t = r0; t < r1; ++t) {
                 const float *c = factors + t * 2 * rope, *s = c + rope;
                 rope_row(from + (t - r0) * stride + nope, rope, interleaved, c, s, q + (t * heads + h) * row + latent);
               }
               gemm_block([=](int64_t t) { return from + (t - r0) * stride; }, r0, r1,
                          [=](int64_t o) { return w_uk + (h * latent + o) * nope; }, 0, latent, nope,
                          [=](int64_t t, int64_t o, const float* values, int64_t count) {
                            store_values(q + (t * heads + h) * row + o, values, count);
                          });
             });
}

template <class T, class PutRow>
void project_latent(const LatentProjection& a, PutRow&& put_row) {
  const int64_t tokens = a.hidden.dim(0);
  const int64_t chunk = projection_chunk(tokens, (a.w_q_a.dim(0) + a.row()) * static_cast<int64_t>(sizeof(T)));
  for (int64_t t = 0; t < tokens; t += chunk) {
    project_chunk<T>(a, t, tokens - t < chunk ? tokens - t : chunk, put_row);
  }
}

}  // namespace glm5::GLM5_LEVEL_NS
