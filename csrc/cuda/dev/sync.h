// Threads of a block and lanes of a warp: barriers, shuffles, votes.
#pragma once

#include "cuda/dev/platform.h"

#if defined(GLM5_CUDA_SIM)

#include "sim/cuda/warp.h"

namespace glm5::dev {
using sim::ballot;
using sim::named_barrier;
using sim::shuffle;
using sim::shuffle_up;
using sim::shuffle_xor;
using sim::sync_threads;
using sim::sync_warp;
}  // namespace glm5::dev

#else

namespace glm5::dev {

GLM5_DEVICE void sync_threads() {
  __syncthreads();
}
GLM5_DEVICE void named_barrier(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
GLM5_DEVICE void sync_warp(u32 mask = kAllLanes) {
  __syncwarp(mask);
}
template <class T>
GLM5_DEVICE T shuffle(T value, int source, u32 mask = kAllLanes) {
  return __shfl_sync(mask, value, source);
}
template <class T>
GLM5_DEVICE T shuffle_xor(T value, int distance, u32 mask = kAllLanes) {
  return __shfl_xor_sync(mask, value, distance);
}
template <class T>
GLM5_DEVICE T shuffle_up(T value, int distance, u32 mask = kAllLanes) {
  return __shfl_up_sync(mask, value, static_cast<u32>(distance));
}
GLM5_DEVICE u32 ballot(bool predicate, u32 mask = kAllLanes) {
  return __ballot_sync(mask, predicate);
}

}  // namespace glm5::dev

#endif

namespace glm5::dev {

// Butterflies: every lane gets the same bits.
GLM5_DEVICE float warp_sum(float x) {
  for (int d = 16; d > 0; d >>= 1) x += shuffle_xor(x, d);
  return x;
}
GLM5_DEVICE float warp_max(float x) {
  for (int d = 16; d > 0; d >>= 1) x = larger(x, shuffle_xor(x, d));
  return x;
}
GLM5_DEVICE int population(u32 bits) {
#if defined(GLM5_CUDA_SIM)
  return __builtin_popcount(bits);
#else
  return __popc(bits);
#endif
}

}  // namespace glm5::dev
