#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// mla_project whose kv goes to kv_cache at slots i64[T] (-1 = do not write): a[P, S, C + R] ("plain") or
// u8[P, S, bytes of a row] ("fp8_ds_mla"). Everything is checked before anything is written.
void mla_preprocess(const Context& ctx, const TensorView& hidden, const TensorView& w_q_a, const TensorView& q_a_norm,
                    const TensorView& w_q_b, const TensorView& w_kv_a, const TensorView& kv_a_norm,
                    const TensorView& w_uk, const TensorView& positions, const TensorView& cos_sin,
                    const TensorView& kv_cache, const TensorView& slots, double eps, bool interleaved,
                    const char* format, const TensorView& q, const TensorView& q_latent);

}  // namespace glm5
