// Matrix instructions of a warp: ldmatrix and mma.sync. Lane 4 g + t holds rows g and g + 8 of A and of the sum, column
// g of B, columns 2 t and 2 t + 1 of the sum. The e4m3 product needs sm_89.
#pragma once

#include "cuda/dev/cp_async.h"

#if defined(GLM5_CUDA_SIM)

#include "sim/cuda/matrix.h"

namespace glm5::dev {

template <class T>
void ldmatrix_x4(u32 (&to)[4], Shared<T> row, GLM5_SIM_SITE) {
  sim::ldmatrix<4, false>(to, row, at);
}
template <class T>
void ldmatrix_x2(u32 (&to)[2], Shared<T> row, GLM5_SIM_SITE) {
  sim::ldmatrix<2, false>(to, row, at);
}
template <class T>
void ldmatrix_x4_trans(u32 (&to)[4], Shared<T> row, GLM5_SIM_SITE) {
  sim::ldmatrix<4, true>(to, row, at);
}
using sim::mma_bf16;
using sim::mma_e4m3;
using sim::mma_int8;

}  // namespace glm5::dev

#else

namespace glm5::dev {

template <class T>
GLM5_DEVICE void ldmatrix_x4(u32 (&to)[4], Shared<T> row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row.p))
               : "memory");
}
template <class T>
GLM5_DEVICE void ldmatrix_x2(u32 (&to)[2], Shared<T> row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(to[0]), "=r"(to[1])
               : "r"(shared_address(row.p))
               : "memory");
}
template <class T>
GLM5_DEVICE void ldmatrix_x4_trans(u32 (&to)[4], Shared<T> row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row.p))
               : "memory");
}

// d += a b: 16 x 16 by 16 x 8.
GLM5_DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], const u32* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// d += a b: 16 x 32 by 32 x 8, four values to a register.
GLM5_DEVICE void mma_e4m3(float (&d)[4], const u32 (&a)[4], const u32* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
GLM5_DEVICE void mma_int8(int (&d)[4], const u32 (&a)[4], const u32* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace glm5::dev

#endif
