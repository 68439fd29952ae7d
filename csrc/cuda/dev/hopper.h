// sm_90a: mbarriers, tensor copies and warpgroup products.
#pragma once

#include "cuda/dev/cp_async.h"

#if defined(GLM5_CUDA_SIM)

#include "sim/cuda/hopper.h"

namespace glm5::dev {
using sim::mbarrier_arrive;
using sim::mbarrier_arrive_expect;
using sim::mbarrier_init;
using sim::mbarrier_wait;
using sim::TensorMap;
using sim::tma_load;
using sim::wgmma_64x64x16;
using sim::wgmma_commit;
using sim::wgmma_wait;

GLM5_DEVICE void mbarrier_fence() {}
GLM5_DEVICE void wgmma_fence() {}
template <class T>
GLM5_DEVICE u64 swizzled_descriptor(Shared<T> p) {
  return sim::swizzled_descriptor(p.raw());
}

}  // namespace glm5::dev

#else

#if defined(__CUDACC_RTC__)
struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};
#else
#include <cuda.h>
#endif

namespace glm5::dev {

using TensorMap = CUtensorMap;

GLM5_DEVICE void mbarrier_init(Shared<u64> barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier.p)), "r"(count) : "memory");
}
// Makes initialised barriers known to the copy engine.
GLM5_DEVICE void mbarrier_fence() {
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
}
GLM5_DEVICE void mbarrier_arrive(Shared<u64> barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier.p)) : "memory");
}
GLM5_DEVICE void mbarrier_arrive_expect(Shared<u64> barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier.p)), "r"(bytes)
               : "memory");
}
// Until the phase of this parity is complete.
GLM5_DEVICE void mbarrier_wait(Shared<u64> barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n"
      "}" ::"r"(shared_address(barrier.p)),
      "r"(parity)
      : "memory");
}

// The map's box at (column, row); the destination is a multiple of 1024 bytes for the 128-byte swizzle.
template <class T>
GLM5_DEVICE void tma_load(Shared<T> to, const TensorMap& map, int column, int row, Shared<u64> barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(to.p)),
      "l"(&map), "r"(shared_address(barrier.p)), "r"(column), "r"(row)
      : "memory");
}

// Rows of 64 16-bit elements in the 128-byte swizzle, 8 rows to 1024 bytes.
template <class T>
GLM5_DEVICE u64 swizzled_descriptor(Shared<T> p) {
  const u64 start = (shared_address(p.p) & 0x3ffffu) >> 4;
  return start | u64{1} << 16 | u64{64} << 32 | u64{1} << 62;
}
GLM5_DEVICE void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
GLM5_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Pending>
GLM5_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// d = a b, + d when accumulate: 64 x 16 by 16 x 64 of bf16, both with k along the rows of their tiles.
GLM5_DEVICE void wgmma_64x64x16(float (&d)[32], u64 a, u64 b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, add, 1, 1, 0, 0;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

}  // namespace glm5::dev

#endif
