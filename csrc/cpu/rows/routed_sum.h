// The weighted sum over a token's experts, shared by the plain and the fused kernels.
#pragma once

#include "cpu/vec.h"

namespace glm5::GLM5_LEVEL_NS {

// sums += weight * round(row): two roundings on every level, as everything else that sums expert rows does.
template <class T, class Row>
GLM5_INLINE void add_routed(const Row* row, float weight, int64_t n, float* sums) {
  for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    store(sums + i, load(sums + i, lanes) + weight * round_to<T>(load(row + i, lanes)), lanes);
  });
}

// y = round(sums)
template <class T>
GLM5_INLINE void store_row(const float* sums, int64_t n, T* y) {
  for_lanes(n,
            [&](int64_t i, auto lanes) __attribute__((always_inline)) { store(y + i, load(sums + i, lanes), lanes); });
}

}  // namespace glm5::GLM5_LEVEL_NS
