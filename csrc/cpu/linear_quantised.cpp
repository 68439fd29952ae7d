#include "glm5/ops/linear_quantised.h"

#include "cpu/kernel.h"
#include "cpu/weight_kinds.h"

namespace glm5::GLM5_LEVEL_NS {
namespace {

template <class Kind, class T, class Y>
void linear_typed(const TensorView& x, const typename Kind::Weight& w, const std::optional<TensorView>& bias,
                  const TensorView& y) {
  const int64_t rows = x.dim(0), k = w.k, outs = w.outs;
  const T *xs = x.data<T>(), *shift = bias ? bias->data<T>() : nullptr;
  Y* to = y.out<Y>();
  auto row_of = [](int64_t r) { return r; };
  Scratch scratch;
  const Activations<Kind> q(scratch, rows, k);
  q.quantise(rows, k, [=](int64_t r) { return xs + r * k; });
  const int32_t offsets[2] = {0, static_cast<int32_t>(rows)};
  Groups groups{offsets, 1};
  groups.pack(scratch, q, k, row_of);
  auto emit = [=](int64_t r, int64_t o, const float* values, int64_t n) {
    for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
      f32v v = load(values + i, lanes);
      if (shift) v = v + load(shift + o + i, lanes);
      store(to + r * outs + o + i, v, lanes);
    });
  };
  for_quant_blocks(groups, outs, k, [&](int64_t e, int64_t r, int64_t r_end, int64_t o, int64_t o_end) {
    quant_block(q, row_of, r, r_end, groups.tiles_at(e, r, Kind::padded(k) / 64), w, o, o_end, emit);
  });
}

}  // namespace
}  // namespace glm5::GLM5_LEVEL_NS

GLM5_KERNEL(linear_quantised,
            (const Context& ctx, const TensorView& x, const TensorView& values, const TensorView& scales,
             const std::optional<TensorView>& bias, const TensorView& y),
            (ctx, x, values, scales, bias, y)) {
  (void)ctx;
  for_weight_kind("linear", "w", values, scales, -1, y.dim(1), x.dim(1), [&](auto kind, const auto& w) {
    using Kind = decltype(kind);
    for_float_type("linear: x", x.dtype(), [&](auto type) {
      using T = decltype(type);
      if (y.dtype() == DType::f32) {
        linear_typed<Kind, T, float>(x, w, bias, y);
      } else {
        linear_typed<Kind, T, T>(x, w, bias, y);
      }
    });
  });
}
