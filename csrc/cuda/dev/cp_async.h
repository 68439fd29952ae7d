// Copies from global to shared memory that run beside the threads (sm_80).
#pragma once

#include "cuda/dev/smem.h"

#if defined(GLM5_CUDA_SIM)

#include "sim/cuda/async_copy.h"

namespace glm5::dev {
using sim::cp_async_16;
using sim::cp_async_commit;
using sim::cp_async_wait;
}  // namespace glm5::dev

#else

namespace glm5::dev {

GLM5_DEVICE u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// 16 bytes, or 16 zeros without reading when not `there`; both addresses are multiples of 16.
template <class T>
GLM5_DEVICE void cp_async_16(Shared<T> to, const T* from, bool there = true) {
  const int valid = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to.p)), "l"(from), "r"(valid)
               : "memory");
}
GLM5_DEVICE void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int Pending>
GLM5_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace glm5::dev

#endif
