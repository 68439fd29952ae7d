// Matrix tiles of bytes: C[16 outputs, 16 rows] += A[16 outputs, 64] B[64, 16 rows], exact in 32 bits.
//
// A is 16 rows of the weight as they lie. B is packed: 16 vectors, of which number i has the elements 4 i .. 4 i + 3 of
// each row. The instructions are spelled out because the compiler's own forms do not say what memory they touch.
#pragma once

#include "cpu/tiles.h"
#include "cpu/transpose.h"

#if GLM5_LEVEL >= 5
namespace glm5::GLM5_LEVEL_NS {

#define GLM5_TILE_ZERO(c) __asm__ volatile("tilezero %%tmm" #c::)
#define GLM5_TILE_LOAD(t, from, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t::"r"(from), "r"(static_cast<int64_t>(stride)) : "memory")
#define GLM5_TILE_STORE(t, to) \
  __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"(int64_t{64}) : "memory")
#define GLM5_TILE_DOT(c, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c::)

// One B tile from 64 bytes of each of 16 rows.
GLM5_INLINE void pack_tile(const int8_t* const* rows, int64_t at, uint8_t* to) {
  f32v v[kTileHeight];  // four bytes a lane; nothing is computed with them
#pragma GCC unroll 16
  for (int i = 0; i < kTileHeight; ++i) std::memcpy(&v[i], rows[i] + at, sizeof v[i]);
  transpose(v);
#pragma GCC unroll 16
  for (int i = 0; i < kTileHeight; ++i) std::memcpy(to + 64 * i, &v[i], sizeof v[i]);
}

// A C tile turned over: to[row * stride + output], in the order of rows.
GLM5_INLINE void turn_tile(const int32_t* from, int32_t* to, int64_t stride) {
  f32v v[kTileHeight];
#pragma GCC unroll 16
  for (int i = 0; i < kTileHeight; ++i) std::memcpy(&v[i], from + kTileHeight * i, sizeof v[i]);
  transpose(v);
#pragma GCC unroll 16
  for (int i = 0; i < kTileHeight; ++i) std::memcpy(to + stride * i, &v[i], sizeof v[i]);
}

}  // namespace glm5::GLM5_LEVEL_NS
#endif
