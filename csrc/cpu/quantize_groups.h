// Rows cut into groups of columns, each with a scale of its own: the body of both quantising ops.
#pragma once

#include "cpu/kernel.h"
#include "cpu/quant_rows.h"

namespace glm5::GLM5_LEVEL_NS {

template <class T>
GLM5_INLINE float quantise(const T* x, int64_t n, int8_t* q) {
  return quantise_int8(x, n, q);
}
template <class T>
GLM5_INLINE float quantise(const T* x, int64_t n, f8_e4m3* q) {
  return quantise_fp8(x, n, reinterpret_cast<uint8_t*>(q));
}

template <class T, class Q>
inline void quantize_groups_typed(const TensorView& x, int64_t width, const TensorView& q, const TensorView& scale) {
  const int64_t n = x.dim(1), groups = scale.dim(1);
  const T* from = x.data<T>();
  Q* to = q.out<Q>();
  float* scales = scale.out<float>();
  parallel_for(x.dim(0), rows_per_range(n), [=](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t first = g * width, count = n - first < width ? n - first : width;
        scales[t * groups + g] = quantise(from + t * n + first, count, to + t * n + first);
      }
    }
  });
}

// Groups of `width` columns, the last as short as it is.
inline void quantize_groups(const char* op, const TensorView& x, int64_t width, const TensorView& q,
                            const TensorView& scale) {
  const DType to = q.dtype();
  if (to != DType::i8 && to != DType::f8_e4m3) {
    fail("%s: dtype is %s, needs int8 or float8_e4m3fn", op, dtype_name(to));
  }
  for_float_type("quantize: x", x.dtype(), [&](auto type) {
    using T = decltype(type);
    if (to == DType::i8) {
      quantize_groups_typed<T, int8_t>(x, width, q, scale);
    } else {
      quantize_groups_typed<T, f8_e4m3>(x, width, q, scale);
    }
  });
}

}  // namespace glm5::GLM5_LEVEL_NS
