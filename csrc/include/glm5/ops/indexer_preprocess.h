#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// indexer_project whose ik goes to index_cache at slots i64[T] (-1 = do not write): a[P, S, Di] ("plain") or
// u8[P, S * (Di + 4)] ("fp8"). Everything is checked before anything is written.
void indexer_preprocess(const Context& ctx, const TensorView& hidden, const TensorView& q_latent, const TensorView& w_q,
                        const TensorView& w_k, const TensorView& k_norm_weight, const TensorView& k_norm_bias,
                        const TensorView& w_weights, const TensorView& positions, const TensorView& cos_sin,
                        const TensorView& index_cache, const TensorView& slots, bool interleaved, double eps,
                        const char* format, const TensorView& iq, const TensorView& iw);

}  // namespace glm5
