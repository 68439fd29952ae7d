// Asking for memory before it is needed.
#pragma once

#include <cstdint>

#include "glm5/check.h"

namespace glm5::GLM5_LEVEL_NS {

GLM5_INLINE void prefetch_bytes(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

}  // namespace glm5::GLM5_LEVEL_NS
