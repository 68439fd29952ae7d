// A warp's matrix instructions: ldmatrix, and mma.sync with bf16, e4m3 and int8 operands.
#pragma once

#include "sim/cuda/shared.h"

namespace glm5::sim {

struct LoadMatrix {
  const unsigned char* row;
  uint32_t* to;
};
// Fragments of `count` 8 x 8 matrices of 16-bit elements, whose rows lanes 8 j to 8 j + 7 name for matrix j.
void load_matrices(void** lanes, int count, bool transposed);

// What a lane holds: 16 x 16 or 16 x 32 of A in four registers, 8 columns of B in two, 16 x 8 of the sum in four.
template <class Sum>
struct Product {
  Sum* d;
  const uint32_t *a, *b;
};
void product_bf16(void** lanes);
void product_e4m3(void** lanes);
void product_int8(void** lanes);

float value_of_e4m3(uint8_t code);

template <int Count, bool Transposed, class T>
void ldmatrix(uint32_t (&to)[Count], Shared<T> row, GLM5_SIM_SITE) {
  static_assert(sizeof(T) == 2, "ldmatrix moves 16-bit elements");
  Block& block = *Block::current();
  if (block.thread().lane < 8u * Count) row.touch(Access::read, 16, 16, at);
  LoadMatrix mine{reinterpret_cast<const unsigned char*>(row.raw()), to};
  block.collective(~0u, "ldmatrix", &mine, false, at,
                   [](void** lanes, uint32_t) { load_matrices(lanes, Count, Transposed); });
}

inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t* b, GLM5_SIM_SITE) {
  Product<float> mine{d, a, b};
  Block::current()->collective(~0u, "mma_bf16", &mine, false, at, [](void** lanes, uint32_t) { product_bf16(lanes); });
}
inline void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], const uint32_t* b, GLM5_SIM_SITE) {
  Product<float> mine{d, a, b};
  Block::current()->collective(~0u, "mma_e4m3", &mine, false, at, [](void** lanes, uint32_t) { product_e4m3(lanes); });
}
inline void mma_int8(int (&d)[4], const uint32_t (&a)[4], const uint32_t* b, GLM5_SIM_SITE) {
  Product<int> mine{d, a, b};
  Block::current()->collective(~0u, "mma_int8", &mine, false, at, [](void** lanes, uint32_t) { product_int8(lanes); });
}

}  // namespace glm5::sim
