#include "glm5/ops/indexer_project.h"

#include "cpu/kernel.h"
#include "cpu/rows/index_projection.h"

GLM5_KERNEL(indexer_project,
            (const Context& ctx, const TensorView& hidden, const TensorView& q_latent, const TensorView& w_q,
             const TensorView& w_k, const TensorView& k_norm_weight, const TensorView& k_norm_bias,
             const TensorView& w_weights, const TensorView& positions, const TensorView& cos_sin, bool interleaved,
             double eps, const TensorView& iq, const TensorView& ik, const TensorView& iw),
            (ctx, hidden, q_latent, w_q, w_k, k_norm_weight, k_norm_bias, w_weights, positions, cos_sin, interleaved,
             eps, iq, ik, iw)) {
  (void)ctx;
  const IndexProjection arguments{hidden,    q_latent,  w_q,     w_k,         k_norm_weight,           k_norm_bias,
                                  w_weights, positions, cos_sin, interleaved, static_cast<float>(eps), iq,
                                  iw};
  arguments.check("indexer_project");
  for_float_type("indexer_project: hidden", hidden.dtype(), [&](auto type) {
    using T = decltype(type);
    T* keys = ik.out<T>();
    const int64_t dim = w_k.dim(0);
    project_index<T>(arguments, [=](int64_t t, T*, auto make) { make(keys + t * dim); });
  });
}
