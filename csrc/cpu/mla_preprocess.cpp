#include "glm5/ops/mla_preprocess.h"

#include "cpu/kernel.h"
#include "cpu/rows/cache.h"
#include "cpu/rows/latent_projection.h"

GLM5_KERNEL(mla_preprocess,
            (const Context& ctx, const TensorView& hidden, const TensorView& w_q_a, const TensorView& q_a_norm,
             const TensorView& w_q_b, const TensorView& w_kv_a, const TensorView& kv_a_norm, const TensorView& w_uk,
             const TensorView& positions, const TensorView& cos_sin, const TensorView& kv_cache,
             const TensorView& slots, double eps, bool interleaved, const char* format, const TensorView& q,
             const TensorView& q_latent),
            (ctx, hidden, w_q_a, q_a_norm, w_q_b, w_kv_a, kv_a_norm, w_uk, positions, cos_sin, kv_cache, slots, eps,
             interleaved, format, q, q_latent)) {
  (void)ctx;
  const bool bytes = is_byte_format("mla_preprocess", format, "fp8_ds_mla");
  const LatentProjection arguments{hidden,      w_q_a, q_a_norm,  w_q_b,   w_kv_a,
                                   kv_a_norm,   w_uk,  positions, cos_sin, static_cast<float>(eps),
                                   interleaved, q,     q_latent};
  const int64_t* to = slots.data<int64_t>();
  arguments.check("mla_preprocess");
  check_slots("mla_preprocess", to, hidden.dim(0), kv_cache.dim(0) * kv_cache.dim(1));
  for_float_type("mla_preprocess: hidden", hidden.dtype(), [&](auto type) {
    using T = decltype(type);
    T* plain = bytes ? nullptr : kv_cache.out<T>();
    uint8_t* coded = bytes ? kv_cache.out<uint8_t>() : nullptr;
    const int64_t latent = arguments.latent(), rope = arguments.rope(), row_bytes = fp8_kv_row_bytes(latent, rope);
    project_latent<T>(arguments, [=](int64_t t, T* buffer, auto make) {
      if (to[t] < 0) return;
      if (!bytes) return make(plain + to[t] * (latent + rope));
      make(buffer);
      write_fp8_kv_row(static_cast<const T*>(buffer), latent, rope, coded + to[t] * row_bytes);
    });
  });
}
