// Gradients of rms_norm over all rows, shared by the plain and the fused kernels.
#pragma once

#include "cpu/kernel.h"
#include "cpu/rows/norm.h"

namespace glm5::GLM5_LEVEL_NS {

constexpr int64_t kSumBlock = 64;  // rows whose share of a weight's gradient is summed before it joins the total

// With n = x * r (r = inverse_rms) and g = grad_y * weight:  dx = r * (g - n * mean(g * n)) + also,
// dweight = sum over rows of grad_y * round(n), in blocks of rows ascending. `also` may be absent.
//   row(t, buffer) -> const T*: row t of x; buffer has space for it
//   part(t, i, lanes) -> f32v: a vector of the same row
//   put(t, i, dx, lanes)
template <class T, class Row, class Part, class Put>
void rms_norm_backward(int64_t rows, int64_t n, float eps, const T* grad_y, const T* weight, const T* also, Row&& row,
                       Part&& part, Put&& put, T* grad_weight) {
  Scratch scratch;
  float* scales = scratch.take<float>(rows);
  parallel_for(rows, rows_per_range(2 * n), [&](int64_t begin, int64_t end) {
    Scratch own;
    T* buffer = own.take<T>(n);
    for (int64_t t = begin; t < end; ++t) {
      const T *x = row(t, buffer), *grad = grad_y + t * n;
      scales[t] = inverse_rms(x, n, eps);
      const f32v scale = broadcast(scales[t]);
      const float products = sum_row(n, [&](f32v chain, int64_t i, auto lanes) __attribute__((always_inline)) {
        return fma(load(grad + i, lanes) * load(weight + i, lanes), load(x + i, lanes) * scale, chain);
      });
      const f32v mean = broadcast(products / static_cast<float>(n));
      for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
        const f32v normed = load(x + i, lanes) * scale;
        f32v dx = (load(grad + i, lanes) * load(weight + i, lanes) - normed * mean) * scale;
        if (also) dx = dx + load(also + t * n + i, lanes);
        put(t, i, dx, lanes);
      });
    }
  });
  const int64_t vectors = (n + kLanes - 1) / kLanes;
  parallel_for(vectors, rows_per_range(rows * kLanes), [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kLanes, last = end * kLanes < n ? end * kLanes : n;
    for_lanes(last - first, [&](int64_t offset, auto lanes) __attribute__((always_inline)) {
      const int64_t i = first + offset;
      f32v total{};
      for (int64_t t = 0; t < rows; t += kSumBlock) {
        f32v sum{};
        for (int64_t j = t; j < rows && j < t + kSumBlock; ++j) {
          sum = fma(load(grad_y + j * n + i, lanes), round_to<T>(part(j, i, lanes) * broadcast(scales[j])), sum);
        }
        total = total + sum;
      }
      store(grad_weight + i, total, lanes);
    });
  });
}

}  // namespace glm5::GLM5_LEVEL_NS
