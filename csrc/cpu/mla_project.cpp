#include "glm5/ops/mla_project.h"

#include "cpu/kernel.h"
#include "cpu/rows/latent_projection.h"

GLM5_KERNEL(mla_project,
            (const Context& ctx, const TensorView& hidden, const TensorView& w_q_a, const TensorView& q_a_norm,
             const TensorView& w_q_b, const TensorView& w_kv_a, const TensorView& kv_a_norm, const TensorView& w_uk,
             const TensorView& positions, const TensorView& cos_sin, double eps, bool interleaved, const TensorView& q,
             const TensorView& kv, const TensorView& q_latent),
            (ctx, hidden, w_q_a, q_a_norm, w_q_b, w_kv_a, kv_a_norm, w_uk, positions, cos_sin, eps, interleaved, q, kv,
             q_latent)) {
  (void)ctx;
  const LatentProjection arguments{hidden,      w_q_a, q_a_norm,  w_q_b,   w_kv_a,
                                   kv_a_norm,   w_uk,  positions, cos_sin, static_cast<float>(eps),
                                   interleaved, q,     q_latent};
  arguments.check("mla_project");
  for_float_type("mla_project: hidden", hidden.dtype(), [&](auto type) {
    using T = decltype(type);
    T* rows = kv.out<T>();
    const int64_t row = arguments.row();
    project_latent<T>(arguments, [=](int64_t t, T*, auto make) { make(rows + t * row); });
  });
}
