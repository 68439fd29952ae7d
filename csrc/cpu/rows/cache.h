// Rows of the paged caches in each format: writing them, and reading them as f32.
//
// KV rows. `plain`: C + R values of the activation dtype. `fp8_ds_mla`: C e4m3 codes, an f32 scale for each 128 of
// them, R bf16 values. Index keys. `plain`: Di values. `fp8`: a page holds the codes of all its keys, then a scale
// each. Byte rows promise no alignment: wider values are copied.
#pragma once

#include "cpu/rows/fp8.h"

namespace glm5::GLM5_LEVEL_NS {

GLM5_INLINE int64_t fp8_groups(int64_t latent) {
  return (latent + kFp8Group - 1) / kFp8Group;
}
GLM5_INLINE int64_t fp8_kv_row_bytes(int64_t latent, int64_t rope) {
  return latent + 4 * fp8_groups(latent) + 2 * rope;
}

// ---- writing ----

template <class T>
GLM5_INLINE void write_fp8_kv_row(const T* x, int64_t latent, int64_t rope, uint8_t* to) {
  uint8_t* scales = to + latent;
  for (int64_t c = 0; c < latent; c += kFp8Group) {
    const float scale = quantise_fp8(x + c, latent - c < kFp8Group ? latent - c : kFp8Group, to + c);
    std::memcpy(scales, &scale, sizeof scale);
    scales += sizeof scale;
  }
  for_lanes(rope, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    store_bits(scales + 2 * i, to_bits(bf16{}, load(x + latent + i, lanes)), lanes);
  });
}

// The key at `offset` of a page of `size` keys.
template <class T>
GLM5_INLINE void write_fp8_index_row(const T* x, int64_t dim, uint8_t* page, int64_t size, int64_t offset) {
  const float scale = quantise_fp8(x, dim, page + offset * dim);
  std::memcpy(page + size * dim + 4 * offset, &scale, sizeof scale);
}

// ---- reading ----

GLM5_INLINE void read_fp8_kv_row(const uint8_t* from, int64_t latent, int64_t rope, float* to) {
  const uint8_t* scales = from + latent;
  for (int64_t c = 0; c < latent; c += kFp8Group) {
    float scale;
    std::memcpy(&scale, scales, sizeof scale);
    dequantise_fp8(from + c, latent - c < kFp8Group ? latent - c : kFp8Group, scale, to + c);
    scales += sizeof scale;
  }
  for_lanes(rope, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    store(to + latent + i, from_bits(bf16{}, load_bits(scales + 2 * i, lanes)), lanes);
  });
}

GLM5_INLINE void read_fp8_index_row(const uint8_t* page, int64_t size, int64_t offset, int64_t dim, float* to) {
  float scale;
  std::memcpy(&scale, page + size * dim + 4 * offset, sizeof scale);
  dequantise_fp8(page + offset * dim, dim, scale, to);
}

}  // namespace glm5::GLM5_LEVEL_NS
