// Normalisation of one row, shared by the plain and the fused kernels.
#pragma once

#include "cpu/vec.h"

namespace glm5::GLM5_LEVEL_NS {

// 1 / sqrt(mean(x^2) + eps) of one row.
template <class T>
GLM5_INLINE float inverse_rms(const T* x, int64_t n, float eps) {
  const float squares = sum_row(n, [&](f32v chain, int64_t i, auto lanes) __attribute__((always_inline)) {
    const f32v v = load(x + i, lanes);
    return fma(v, v, chain);
  });
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
}

// y = round(round(x * inverse_rms) * weight); y may be x.
template <class T>
GLM5_INLINE void rms_norm_row(const T* x, const T* weight, int64_t n, float eps, T* y) {
  const f32v scale = broadcast(inverse_rms(x, n, eps));
  for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    store(y + i, round_to<T>(load(x + i, lanes) * scale) * load(weight + i, lanes), lanes);
  });
}

// y = (x - mean) / sqrt(var + eps) * weight + bias, rounded once; y may be x.
template <class T>
GLM5_INLINE void layer_norm_row(const T* x, const T* weight, const T* bias, int64_t n, float eps, T* y) {
  const float count = static_cast<float>(n);
  const f32v mean = broadcast(sum_row(n, [&](f32v chain, int64_t i, auto lanes)
                                             __attribute__((always_inline)) { return chain + load(x + i, lanes); }) /
                              count);
  const float variance = sum_row(n,
                                 [&](f32v chain, int64_t i, auto lanes) __attribute__((always_inline)) {
                                   const f32v v = fill_past(load(x + i, lanes) - mean, lanes, 0.0f);
                                   return fma(v, v, chain);
                                 }) /
                         count;
  const f32v scale = broadcast(1.0f / __builtin_sqrtf(variance + eps));
  for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    store(y + i, fma((load(x + i, lanes) - mean) * scale, load(weight + i, lanes), load(bias + i, lanes)), lanes);
  });
}

// z = x + y, rounded once; z may be x or y.
template <class T>
GLM5_INLINE void add_row(const T* x, const T* y, int64_t n, T* z) {
  for_lanes(n, [&](int64_t i, auto lanes)
                   __attribute__((always_inline)) { store(z + i, load(x + i, lanes) + load(y + i, lanes), lanes); });
}

}  // namespace glm5::GLM5_LEVEL_NS
