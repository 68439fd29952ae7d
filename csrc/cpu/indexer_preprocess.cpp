#include "glm5/ops/indexer_preprocess.h"

#include "cpu/kernel.h"
#include "cpu/rows/cache.h"
#include "cpu/rows/index_projection.h"

GLM5_KERNEL(indexer_preprocess,
            (const Context& ctx, const TensorView& hidden, const TensorView& q_latent, const TensorView& w_q,
             const TensorView& w_k, const TensorView& k_norm_weight, const TensorView& k_norm_bias,
             const TensorView& w_weights, const TensorView& positions, const TensorView& cos_sin,
             const TensorView& index_cache, const TensorView& slots, bool interleaved, double eps, const char* format,
             const TensorView& iq, const TensorView& iw),
            (ctx, hidden, q_latent, w_q, w_k, k_norm_weight, k_norm_bias, w_weights, positions, cos_sin, index_cache,
             slots, interleaved, eps, format, iq, iw)) {
  (void)ctx;
  const bool bytes = is_byte_format("indexer_preprocess", format, "fp8");
  const IndexProjection arguments{hidden,    q_latent,  w_q,     w_k,         k_norm_weight,           k_norm_bias,
                                  w_weights, positions, cos_sin, interleaved, static_cast<float>(eps), iq,
                                  iw};
  const int64_t dim = w_k.dim(0), size = bytes ? index_cache.dim(1) / (dim + 4) : index_cache.dim(1);
  const int64_t* to = slots.data<int64_t>();
  arguments.check("indexer_preprocess");
  check_slots("indexer_preprocess", to, hidden.dim(0), index_cache.dim(0) * size);
  for_float_type("indexer_preprocess: hidden", hidden.dtype(), [&](auto type) {
    using T = decltype(type);
    T* plain = bytes ? nullptr : index_cache.out<T>();
    uint8_t* coded = bytes ? index_cache.out<uint8_t>() : nullptr;
    project_index<T>(arguments, [=](int64_t t, T* buffer, auto make) {
      if (to[t] < 0) return;
      if (!bytes) return make(plain + to[t] * dim);
      make(buffer);
      write_fp8_index_row(static_cast<const T*>(buffer), dim, coded + to[t] / size * size * (dim + 4), size,
                          to[t] % size);
    });
  });
}
