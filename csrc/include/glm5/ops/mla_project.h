#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// q_latent = rms_norm(hidden w_q_a); each head of q_latent w_q_b is [nope Dn | rope R]: q = [nope . w_uk | rope at the
// token's position]. kv = [rms_norm of the first C of hidden w_kv_a | rope of the last R]. Rounded wherever the single
// ops round. hidden a[T, N], w_q_a a[Q, N], q_a_norm a[Q], w_q_b a[H * (Dn + R), Q], w_kv_a a[C + R, N],
// kv_a_norm a[C], w_uk a[H, C, Dn], positions i64[T], cos_sin f32[Pmax, R], q a[T, H, C + R], kv a[T, C + R],
// q_latent a[T, Q].
void mla_project(const Context& ctx, const TensorView& hidden, const TensorView& w_q_a, const TensorView& q_a_norm,
                 const TensorView& w_q_b, const TensorView& w_kv_a, const TensorView& kv_a_norm, const TensorView& w_uk,
                 const TensorView& positions, const TensorView& cos_sin, double eps, bool interleaved,
                 const TensorView& q, const TensorView& kv, const TensorView& q_latent);

}  // namespace glm5
