// What a kernel is told besides its tensors.
#pragma once

#include <cstdint>

namespace glm5 {

// Instruction levels, ordered: each op runs its best variant not above the level it is given.
enum class Level : int { baseline = 0, avx2 = 1, avx512 = 2, avx512_vnni = 3, avx512_bf16 = 4, amx = 5 };

struct Context {
  Level level = Level::baseline;
  // Of devices: the queue that work goes to, and scratch memory that the caller allocated by the op's rule.
  void* stream = nullptr;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

}  // namespace glm5
