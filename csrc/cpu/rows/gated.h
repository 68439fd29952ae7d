// The gated activation of SwiGLU, shared by the plain op and the fused experts.
#pragma once

#include <optional>

#include "cpu/vec_math.h"

namespace glm5::GLM5_LEVEL_NS {

// round(round(silu(gate)) * up), the inputs values of T held as f32. A finite limit clamps before: gate from above,
// up from both sides; a NaN passes.
template <class T>
GLM5_INLINE f32v gated(f32v gate, f32v up, float limit) {
  const f32v most = broadcast(limit);
  gate = min(most, gate);
  up = max(-most, min(most, up));
  return round_to<T>(round_to<T>(silu(gate)) * up);
}

// No limit: clamping to infinity changes nothing.
GLM5_INLINE float limit_or_none(const std::optional<double>& limit) {
  return limit ? static_cast<float>(*limit) : __builtin_inff();
}

}  // namespace glm5::GLM5_LEVEL_NS
