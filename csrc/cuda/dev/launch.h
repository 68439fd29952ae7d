// From the host: one launch with two bodies, and the values a kernel cannot check for itself.
#pragma once

#include "cuda/dev/platform.h"

#if !defined(__CUDACC_RTC__)

#include <cstddef>

#include "glm5/check.h"
#include "glm5/context.h"

#if defined(GLM5_CUDA_SIM)
#include "sim/cuda/launch.h"
#endif

namespace glm5::dev {

constexpr size_t kPortableShared = 99 * 1024;  // what every card from sm_80 on lends a block

struct Grid {
  unsigned x, y, z;
};

#if defined(GLM5_CUDA_SIM)

// The simulator looks at values before it launches; a device treats bad ones as absent.
template <class F>
void check_on_host(F&& check) {
  if (sim::values_are_checked()) check();
}

template <class... Parameters, class... Arguments>
void launch(const Context&, const char* name, void (*kernel)(Parameters...), Grid grid, unsigned threads,
            size_t shared_bytes, Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  sim::launch(name, kernel, sim::Index3{grid.x, grid.y, grid.z}, threads, shared_bytes, kPortableShared, arguments...);
}

#else

template <class F>
void check_on_host(F&&) {}

template <class... Parameters, class... Arguments>
void launch(const Context& ctx, const char* name, void (*kernel)(Parameters...), Grid grid, unsigned threads,
            size_t shared_bytes, Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (shared_bytes > 48 * 1024) {
    cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(shared_bytes));
  }
  const dim3 blocks(grid.x, grid.y, grid.z);
  // The formatter takes the brackets for shifts.
  // clang-format off
  kernel<<<blocks, threads, shared_bytes, static_cast<cudaStream_t>(ctx.stream)>>>(arguments...);
  // clang-format on
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) fail("%s: launch failed: %s", name, cudaGetErrorString(error));
}

#endif

}  // namespace glm5::dev

#endif
