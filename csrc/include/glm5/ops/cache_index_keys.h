#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// Writes index keys a[T, Di] to index_cache at slots i64[T] (page * S + offset, -1 = do not write). index_cache is
// a[P, S, Di] ("plain") or u8[P, S * (Di + 4)] ("fp8": all codes of a page, then its scales).
void cache_index_keys(const Context& ctx, const TensorView& rows, const TensorView& index_cache,
                      const TensorView& slots, const char* format);

}  // namespace glm5
