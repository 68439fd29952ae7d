#include "glm5/ops/mla_expand_values.h"

#include "cpu/gemm_tile.h"
#include "cpu/kernel.h"

namespace glm5::GLM5_LEVEL_NS {
namespace {

template <class T>
void expand_typed(const TensorView& out, const TensorView& w_uv, const TensorView& y) {
  const int64_t tokens = out.dim(0), heads = w_uv.dim(0), outs = w_uv.dim(1), k = w_uv.dim(2);
  const T *xs = out.data<T>(), *ws = w_uv.data<T>();
  T* to = y.out<T>();
  if (tokens == 0 || heads == 0 || outs == 0) return;
  const int64_t block = block_rows<T, T>(k), row_blocks = (tokens + block - 1) / block;
  // Heads split the work; outputs do where there are too few heads for the threads.
  int64_t parts = (4 * get_num_threads() + heads * row_blocks - 1) / (heads * row_blocks);
  constexpr int64_t granule = kSplitOuts<T, T>;
  const int64_t width = ((outs + parts - 1) / parts + granule - 1) / granule * granule;
  parts = (outs + width - 1) / width;
  const int64_t unit_work = (tokens < block ? tokens : block) * width * (k + 1);
  parallel_for(heads * row_blocks * parts, (int64_t{1} << 16) / unit_work + 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t h = unit / (row_blocks * parts);
      const int64_t r = unit / parts % row_blocks * block, o = unit % parts * width;
      gemm_block([=](int64_t t) { return xs + (t * heads + h) * k; }, r, r + block < tokens ? r + block : tokens,
                 [=](int64_t v) { return ws + (h * outs + v) * k; }, o, o + width < outs ? o + width : outs, k,
                 [=](int64_t t, int64_t v, const float* values, int64_t n) {
                   T* row = to + (t * heads + h) * outs + v;
                   for_lanes(n, [&](int64_t i, auto lanes)
                                    __attribute__((always_inline)) { store(row + i, load(values + i, lanes), lanes); });
                 });
    }
  });
}

}  // namespace
}  // namespace glm5::GLM5_LEVEL_NS

GLM5_KERNEL(mla_expand_values, (const Context& ctx, const TensorView& out, const TensorView& w_uv, const TensorView& y),
            (ctx, out, w_uv, y)) {
  (void)ctx;
  for_float_type("mla_expand_values: out", out.dtype(), [&](auto type) { expand_typed<decltype(type)>(out, w_uv, y); });
}
