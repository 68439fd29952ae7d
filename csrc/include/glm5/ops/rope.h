#pragma once

#include "glm5/context.h"
#include "glm5/tensor.h"

namespace glm5 {

// Rotates pairs of x a[T, H, R] at positions i64[T] into y a[T, H, R]. cos_sin f32[Pmax, R] holds R/2 cosines, then
// R/2 sines. Pairs are neighbours (2i, 2i + 1) when interleaved, else (i, i + R/2); they stay in place.
void rope(const Context& ctx, const TensorView& x, const TensorView& positions, const TensorView& cos_sin,
          bool interleaved, const TensorView& y);

}  // namespace glm5
