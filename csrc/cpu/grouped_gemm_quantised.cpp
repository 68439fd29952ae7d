#include "glm5/ops/grouped_gemm_quantised.h"

#include "cpu/kernel.h"
#include "cpu/rows/routing.h"
#include "cpu/weight_kinds.h"

namespace glm5::GLM5_LEVEL_NS {
namespace {

template <class Kind, class T>
void grouped_typed(const TensorView& x, const typename Kind::Weight& w, const int32_t* bounds, int64_t experts,
                   const TensorView& y) {
  const int64_t k = w.k, outs = w.outs;
  const T* xs = x.data<T>();
  T* to = y.out<T>();
  auto row_of = [](int64_t r) { return r; };
  Scratch scratch;
  Groups groups{bounds, experts};
  const Activations<Kind> q(scratch, groups.rows(), k);
  q.quantise(groups.rows(), k, [=](int64_t r) { return xs + r * k; });
  groups.pack(scratch, q, k, row_of);
  auto emit = [=](int64_t r, int64_t o, const float* values, int64_t n) {
    for_lanes(n, [&](int64_t i, auto lanes)
                     __attribute__((always_inline)) { store(to + r * outs + o + i, load(values + i, lanes), lanes); });
  };
  for_quant_blocks(groups, outs, k, [&](int64_t e, int64_t r, int64_t r_end, int64_t o, int64_t o_end) {
    quant_block(q, row_of, r, r_end, groups.tiles_at(e, r, Kind::padded(k) / 64), w.at(e), o, o_end, emit);
  });
  const int64_t used = groups.rows() * outs;
  std::memset(static_cast<void*>(to + used), 0, (x.dim(0) * outs - used) * sizeof(T));
}

}  // namespace
}  // namespace glm5::GLM5_LEVEL_NS

GLM5_KERNEL(grouped_gemm_quantised,
            (const Context& ctx, const TensorView& x, const TensorView& values, const TensorView& scales,
             const TensorView& offsets, const TensorView& y),
            (ctx, x, values, scales, offsets, y)) {
  (void)ctx;
  const int64_t experts = offsets.dim(0) - 1;
  const int32_t* bounds = offsets.data<int32_t>();
  check_offsets("grouped_gemm", bounds, experts, x.dim(0));
  for_weight_kind("grouped_gemm", "w", values, scales, experts, y.dim(1), x.dim(1), [&](auto kind, const auto& w) {
    for_float_type("grouped_gemm: x", x.dtype(),
                   [&](auto type) { grouped_typed<decltype(kind), decltype(type)>(x, w, bounds, experts, y); });
  });
}
