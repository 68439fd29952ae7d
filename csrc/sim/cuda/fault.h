// Accesses that the memory management unit refuses: they end the block, not the process.
#pragma once

#include <cstddef>

#include "sim/cuda/site.h"

namespace glm5::sim {

// Makes sure, on this thread of the system, that bad accesses of a running block come back to it.
class SignalGuard {
 public:
  SignalGuard();
};

// "write to address ..., 4 bytes behind the end of `out`, at csrc/cuda/x.cu:12"; the line is `known`, or read off pc.
void describe_bad_access(char* to, size_t size, const void* address, const void* pc, bool wrote, bool stack_overflow,
                         Site known);

}  // namespace glm5::sim
