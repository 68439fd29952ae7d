// Which kind of weight a kernel was given: the dtype of the values says it.
#pragma once

#include "cpu/fp8_tile.h"
#include "cpu/int4_tile.h"
#include "cpu/int8_tile.h"

namespace glm5::GLM5_LEVEL_NS {

inline void check_weight(const char* op, const char* name, const char* part, const TensorView& tensor, int64_t experts,
                         int64_t rows, int64_t columns) {
  const int axes = (experts >= 0) + 1 + (columns >= 0);
  bool fits = tensor.ndim() == axes;
  if (fits && experts >= 0) fits = tensor.dim(0) == experts;
  if (fits) fits = tensor.dim(experts >= 0) == rows && (columns < 0 || tensor.dim(-1) == columns);
  if (!fits) {
    const int64_t got = tensor.numel(), want = (experts >= 0 ? experts : 1) * rows * (columns >= 0 ? columns : 1);
    fail("%s: %s of %s have %d axes and %lld elements, need %d axes and %lld: other sizes than the weight's shape", op,
         part, name, tensor.ndim(), static_cast<long long>(got), axes, static_cast<long long>(want));
  }
}

// Calls f(kind, weight) with the Weight of Int8, Int4 or Fp8 that the values' dtype names. Throws unless values and
// scales have that kind's shapes for a weight [outs, k], or [experts, outs, k] with experts >= 0.
template <class F>
inline void for_weight_kind(const char* op, const char* name, const TensorView& values, const TensorView& scales,
                            int64_t experts, int64_t outs, int64_t k, F&& f) {
  const float* s = scales.data<float>();
  if (k > kMostTerms) {
    fail("%s: %s has %lld columns, needs at most %lld", op, name, static_cast<long long>(k),
         static_cast<long long>(kMostTerms));
  }
  switch (values.dtype()) {
    case DType::i8:
      check_weight(op, name, "the values", values, experts, outs, k);
      check_weight(op, name, "the scales", scales, experts, outs, -1);
      return f(Int8{}, Int8::Weight{values.data<int8_t>(), s, outs, k});
    case DType::u8:
      check_weight(op, name, "the values", values, experts, outs, (k + 1) / 2);
      check_weight(op, name, "the scales", scales, experts, outs, groups_of(k));
      return f(Int4{}, Int4::Weight{values.data<uint8_t>(), s, outs, k});
    case DType::f8_e4m3:
      check_weight(op, name, "the values", values, experts, outs, k);
      check_weight(op, name, "the scales", scales, experts, groups_of(outs), groups_of(k));
      return f(Fp8{}, Fp8::Weight{reinterpret_cast<const uint8_t*>(values.data<f8_e4m3>()), s, outs, k});
    default:
      fail("%s: the values of %s are %s, need i8 (w8a8), u8 (w4a8) or f8_e4m3 (fp8)", op, name,
           dtype_name(values.dtype()));
  }
}

}  // namespace glm5::GLM5_LEVEL_NS
