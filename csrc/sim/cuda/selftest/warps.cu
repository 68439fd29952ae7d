// Threads that do not come where others wait for them, and threads that use up their stack.
#include "cuda/dev/smem.h"
#include "cuda/dev/sync.h"
#include "sim/cuda/selftest/selftest.h"

namespace glm5::sim {
namespace {

constexpr int kThreads = 64;

template <bool Bug>
__global__ void divergent_barrier(const unsigned short*, float* out) {
  if (Bug && dev::warp_index() == 1) {
    dev::sync_threads();
    out[dev::thread_index()] = 1.0f;
  } else {
    dev::sync_threads();  // BUG divergent_barrier
    out[dev::thread_index()] = 2.0f;
  }
}

template <bool Bug>
__global__ void barrier_after_exit(const unsigned short*, float* out) {
  if (Bug && dev::thread_index() == 3) return;
  dev::sync_threads();  // BUG barrier_after_exit
  out[dev::thread_index()] = 1.0f;
}

// Half of a warp shuffles with the mask of all of it, and the other half never comes.
template <bool Bug>
__global__ void partial_warp(const unsigned short*, float* out) {
  float value = 1.0f;
  if (!Bug || dev::lane_index() < 16) value += dev::shuffle_xor(value, 1);  // BUG partial_warp
  out[dev::thread_index()] = value;
}

template <bool Bug>
__global__ void divergent_warp(const unsigned short*, float* out) {
  float value = 1.0f;
  if (Bug && dev::lane_index() >= 16) {
    value += dev::shuffle_xor(value, 2);  // BUG divergent_warp
  } else {
    value += dev::shuffle_xor(value, 1);
  }
  out[dev::thread_index()] = value;
}

template <bool Bug>
__global__ void lane_outside_of_mask(const unsigned short*, float* out) {
  const float value = 1.0f;
  out[dev::thread_index()] =
      dev::shuffle_xor(value, 1, Bug ? 0x7fffffffu : dev::kAllLanes);  // BUG lane_outside_of_mask
}

template <bool Bug>
__global__ void deadlock(const unsigned short*, float* out) {
  if (Bug && dev::thread_index() % 32 == 0) {
    dev::named_barrier(1, 32);
  } else {
    dev::sync_threads();  // BUG deadlock
  }
  out[dev::thread_index()] = 1.0f;
}

int deeper(int n, volatile char* above) {
  volatile char here[1024];
  here[0] = static_cast<char>(n + above[0]);  // BUG stack_overflow
  return n == 0 ? here[0] : deeper(n - 1, here) + here[0];
}
template <bool Bug>
__global__ void stack_overflow(const unsigned short*, float* out) {
  volatile char first = 0;
  out[dev::thread_index()] = static_cast<float>(deeper(Bug ? 2000 : 2, &first));
}

template <void (*Good)(const unsigned short*, float*), void (*Bad)(const unsigned short*, float*)>
void run(bool bug, const unsigned short* in, float* out) {
  dev::launch(Context{}, "selftest", bug ? Bad : Good, {1, 1, 1}, kThreads, 8192, in, out);
}

}  // namespace

float* nowhere() {
  return nullptr;
}

std::vector<SelfTest> warp_selftests() {
#define GLM5_SELFTEST(name)             \
  SelfTest {                            \
    #name, run<name<false>, name<true>> \
  }
  return {GLM5_SELFTEST(divergent_barrier), GLM5_SELFTEST(barrier_after_exit),   GLM5_SELFTEST(partial_warp),
          GLM5_SELFTEST(divergent_warp),    GLM5_SELFTEST(lane_outside_of_mask), GLM5_SELFTEST(deadlock),
          GLM5_SELFTEST(stack_overflow)};
}

}  // namespace glm5::sim
