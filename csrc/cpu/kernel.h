// How a kernel file becomes one function per instruction level plus the public function that picks one.
//
// Every csrc/cpu/<op>.cpp is compiled once per level; CMake defines GLM5_LEVEL (0 to 5, the numbers of glm5::Level)
// and GLM5_LEVEL_NS (baseline, avx2, avx512, and for some ops avx512_vnni, avx512_bf16, amx). Whatever a kernel file or
// a kernel header defines lives in glm5::GLM5_LEVEL_NS. Containers and algorithms of std:: stay out of these files:
// their instantiations would be shared between levels.
#pragma once

#include <optional>

#include "glm5/context.h"
#include "glm5/scratch.h"
#include "glm5/tensor.h"
#include "glm5/thread_pool.h"

#define GLM5_DECLARE_LEVEL(name, op, parameters) \
  namespace glm5::name {                         \
  void op parameters;                            \
  }
#define GLM5_USE_LEVEL(name, op, arguments) \
  if (ctx.level >= Level::name) return name::op arguments;

// The levels above avx512 exist for the ops that csrc/ops.cmake lists under them. Where those of bf16 products do, they
// hold kernels for bf16 activations alone: f32 and f16 have nothing to gain there and run avx512's.
namespace glm5 {

// Whether the first tensor of an op, its activations, is bf16.
template <class... Rest>
GLM5_INLINE bool has_bf16_activations(const Context&, const TensorView& first, const Rest&...) {
  return first.dtype() == DType::bf16;
}

}  // namespace glm5

#if GLM5_HAS_VNNI
#define GLM5_DECLARE_VNNI(op, parameters) GLM5_DECLARE_LEVEL(avx512_vnni, op, parameters)
#define GLM5_USE_VNNI(op, arguments) GLM5_USE_LEVEL(avx512_vnni, op, arguments)
#else
#define GLM5_DECLARE_VNNI(op, parameters)
#define GLM5_USE_VNNI(op, arguments)
#endif
#if GLM5_HAS_BF16
#define GLM5_DECLARE_BF16(op, parameters) GLM5_DECLARE_LEVEL(avx512_bf16, op, parameters)
#define GLM5_USE_BF16(op, arguments) \
  if (ctx.level >= Level::avx512_bf16 && has_bf16_activations arguments) return avx512_bf16::op arguments;
#else
#define GLM5_DECLARE_BF16(op, parameters)
#define GLM5_USE_BF16(op, arguments)
#endif
#if GLM5_HAS_AMX
#define GLM5_DECLARE_AMX(op, parameters) GLM5_DECLARE_LEVEL(amx, op, parameters)
#if GLM5_HAS_BF16
#define GLM5_USE_AMX(op, arguments) \
  if (ctx.level >= Level::amx && has_bf16_activations arguments) return amx::op arguments;
#else
#define GLM5_USE_AMX(op, arguments) GLM5_USE_LEVEL(amx, op, arguments)
#endif
#else
#define GLM5_DECLARE_AMX(op, parameters)
#define GLM5_USE_AMX(op, arguments)
#endif

#if defined(__x86_64__)
#define GLM5_DECLARE_LEVELS(op, parameters)    \
  GLM5_DECLARE_LEVEL(baseline, op, parameters) \
  GLM5_DECLARE_LEVEL(avx2, op, parameters)     \
  GLM5_DECLARE_LEVEL(avx512, op, parameters)   \
  GLM5_DECLARE_VNNI(op, parameters)            \
  GLM5_DECLARE_BF16(op, parameters)            \
  GLM5_DECLARE_AMX(op, parameters)
#define GLM5_PICK_LEVEL(op, arguments)  \
  GLM5_USE_AMX(op, arguments)           \
  GLM5_USE_BF16(op, arguments)          \
  GLM5_USE_VNNI(op, arguments)          \
  GLM5_USE_LEVEL(avx512, op, arguments) \
  GLM5_USE_LEVEL(avx2, op, arguments)   \
  return baseline::op arguments;
#else
#define GLM5_DECLARE_LEVELS(op, parameters) GLM5_DECLARE_LEVEL(baseline, op, parameters)
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
