#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// Writes rows a[T, C + R] to kv_cache at slots i64[T] (page * S + offset, -1 = do not write); C is v_dim. kv_cache is
// a[P, S, C + R] ("plain") or u8[P, S, bytes of a row] ("fp8_ds_mla").
void concat_and_cache_mla(const Context& ctx, const TensorView& rows, const TensorView& kv_cache,
                          const TensorView& slots, int64_t v_dim, const char* format);

}  // namespace glm5
