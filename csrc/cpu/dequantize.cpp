#include "glm5/ops/dequantize.h"

#include "cpu/kernel.h"
#include "cpu/quant_rows.h"

namespace glm5::GLM5_LEVEL_NS {
namespace {

GLM5_INLINE f32v values_of(int8_t, u8v codes) {
  const i32v wide = (i32v)widen_bytes(codes);
  return __builtin_convertvector((wide ^ 0x80) - 0x80, f32v);
}
GLM5_INLINE f32v values_of(f8_e4m3, u8v codes) {
  return from_fp8(codes);
}

template <class Q, class Y>
void dequantize_typed(const TensorView& q, const TensorView& scale, const TensorView& y) {
  const int64_t n = q.dim(1), groups = scale.dim(1), width = groups == 1 ? n : kGroup;
  const auto* codes = reinterpret_cast<const uint8_t*>(q.data<Q>());
  const float* scales = scale.data<float>();
  Y* to = y.out<Y>();
  parallel_for(q.dim(0), rows_per_range(n), [=](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t first = t * n + g * width, left = n - g * width, count = left < width ? left : width;
        const f32v factor = broadcast(scales[t * groups + g]);
        for_lanes(count, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
          store(to + first + i, values_of(Q{}, load_bytes(codes + first + i, lanes)) * factor, lanes);
        });
      }
    }
  });
}

}  // namespace
}  // namespace glm5::GLM5_LEVEL_NS

GLM5_KERNEL(dequantize, (const Context& ctx, const TensorView& q, const TensorView& scale, const TensorView& y),
            (ctx, q, scale, y)) {
  (void)ctx;
  const DType from = q.dtype();
  if (from != DType::i8 && from != DType::f8_e4m3) {
    fail("dequantize: q is %s, needs int8 or float8_e4m3fn", dtype_name(from));
  }
  for_float_type("dequantize: out_dtype", y.dtype(), [&](auto type) {
    using Y = decltype(type);
    if (from == DType::i8) {
      dequantize_typed<int8_t, Y>(q, scale, y);
    } else {
      dequantize_typed<f8_e4m3, Y>(q, scale, y);
    }
  });
}
