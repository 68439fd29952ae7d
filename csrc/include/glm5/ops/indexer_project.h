#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// iq = q_latent w_q per head; ik = layer_norm(hidden w_k); both with rope on their first R values. iw = hidden
// w_weights
// * Hi^-0.5 * Di^-0.5, never rounded; the others wherever the single ops round. hidden a[T, N], q_latent a[T, Q],
// w_q a[Hi * Di, Q], w_k a[Di, N], k_norm_weight and k_norm_bias a[Di], w_weights a[Hi, N], positions i64[T],
// cos_sin f32[Pmax, R], iq a[T, Hi, Di], ik a[T, Di], iw f32[T, Hi].
void indexer_project(const Context& ctx, const TensorView& hidden, const TensorView& q_latent, const TensorView& w_q,
                     const TensorView& w_k, const TensorView& k_norm_weight, const TensorView& k_norm_bias,
                     const TensorView& w_weights, const TensorView& positions, const TensorView& cos_sin,
                     bool interleaved, double eps, const TensorView& iq, const TensorView& ik, const TensorView& iw);

}  // namespace glm5
