// Small kernels, each right or with one planted bug, that show what the simulator catches. A line that a fault should
// name ends in a comment with "BUG" and the kernel's name.
#pragma once

#include <vector>

#include "cuda/dev/launch.h"

namespace glm5::sim {

struct SelfTest {
  const char* name;
  // in and out hold 64 x 64 elements; `bug` plants it.
  void (*run)(bool bug, const unsigned short* in, float* out);
};
std::vector<SelfTest> memory_selftests();
std::vector<SelfTest> warp_selftests();
std::vector<SelfTest> hopper_selftests();

// Null, which a compiler that saw it would not store to.
float* nowhere();

constexpr int kSelfTestValues = 64 * 64;

}  // namespace glm5::sim
