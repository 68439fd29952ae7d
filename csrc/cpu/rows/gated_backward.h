// Gradient of SwiGLU's gated activation.
#pragma once

#include "cpu/rows/gated.h"

namespace glm5::GLM5_LEVEL_NS {

// Gradients of silu(gate) * up, not rounded; a clamped input has none.
GLM5_INLINE void gated_backward(f32v grad, f32v gate, f32v up, float limit, f32v& d_gate, f32v& d_up) {
  const f32v most = broadcast(limit), kept_gate = min(most, gate), kept_up = max(-most, min(most, up));
  const f32v open = sigmoid(kept_gate);
  d_gate = grad * kept_up * open * (1.0f + kept_gate * (1.0f - open));
  d_up = grad * kept_gate * open;
  d_gate = gate > most ? f32v{} : d_gate;
  d_up = up > most ? f32v{} : up < -most ? f32v{} : d_up;
}

}  // namespace glm5::GLM5_LEVEL_NS
