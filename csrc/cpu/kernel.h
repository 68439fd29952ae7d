// How a kernel file becomes one function per instruction level plus the public function that picks one.
//
// Every csrc/cpu/<op>.cpp is compiled once per level; CMake defines GLM5_LEVEL (0, 1, 2) and GLM5_LEVEL_NS
// (baseline, avx2, avx512). Whatever a kernel file or a kernel header defines lives in glm5::GLM5_LEVEL_NS.
// Containers and algorithms of std:: stay out of these files: their instantiations would be shared between levels.
#pragma once

#include <optional>

#include "glm5/context.h"
#include "glm5/scratch.h"
#include "glm5/tensor.h"
#include "glm5/thread_pool.h"

#if defined(__x86_64__)
#define GLM5_DECLARE_LEVELS(op, parameters) \
  namespace glm5 {                          \
  namespace baseline {                      \
  void op parameters;                       \
  }                                         \
  namespace avx2 {                          \
  void op parameters;                       \
  }                                         \
  namespace avx512 {                        \
  void op parameters;                       \
  }                                         \
  }
#define GLM5_PICK_LEVEL(op, arguments)                         \
  if (ctx.level >= Level::avx512) return avx512::op arguments; \
  if (ctx.level >= Level::avx2) return avx2::op arguments;     \
  return baseline::op arguments;
#else
#define GLM5_DECLARE_LEVELS(op, parameters) \
  namespace glm5::baseline {                \
  void op parameters;                       \
  }
#define GLM5_PICK_LEVEL(op, arguments) return baseline::op arguments;
#endif

#if GLM5_LEVEL == 0
#define GLM5_DEFINE_PUBLIC(op, parameters, arguments) \
  namespace glm5 {                                    \
  void op parameters {                                \
    FloatEnvironment environment;                     \
    GLM5_PICK_LEVEL(op, arguments)                    \
  }                                                   \
  }
#else
#define GLM5_DEFINE_PUBLIC(op, parameters, arguments)
#endif

// Opens the definition of a kernel, at global scope:
//   GLM5_KERNEL(add, (const Context& ctx, const TensorView& x, ...), (ctx, x, ...)) { body }
// The first parameter is named ctx; the header glm5/ops/<op>.h declares the same signature.
#define GLM5_KERNEL(op, parameters, arguments)  \
  GLM5_DECLARE_LEVELS(op, parameters)           \
  GLM5_DEFINE_PUBLIC(op, parameters, arguments) \
  void glm5::GLM5_LEVEL_NS::op parameters

namespace glm5::GLM5_LEVEL_NS {

// How many rows of `n` elements are worth handing to another thread (waking one costs some microseconds).
GLM5_INLINE int64_t rows_per_range(int64_t n) {
  return n > 0 ? (int64_t{1} << 14) / n + 1 : int64_t{1} << 14;
}

}  // namespace glm5::GLM5_LEVEL_NS
