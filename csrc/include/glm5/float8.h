// The 8-bit float of quantised weights and activations: storage only, as the 16-bit ones.
#pragma once

#include "glm5/tensor.h"

namespace glm5 {

struct f8_e4m3 {
  uint8_t bits;
};
template <>
struct dtype_of<f8_e4m3> {
  static constexpr DType value = DType::f8_e4m3;
};

}  // namespace glm5
