// Philox4x32-10 and the Gumbel noise made of it: a function of (seed, position, token) and of nothing else.
//
// Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
#pragma once

#include "cpu/vec_math.h"

namespace glm5::GLM5_LEVEL_NS {

typedef uint64_t u64v __attribute__((vector_size(4 * kLanes)));

constexpr uint32_t kDraw = 0;             // the purpose of the sampler's own draw
constexpr int kNoiseTokens = 4 * kLanes;  // tokens whose noise is made at once

// a * b of the even lanes, 64 bits each.
GLM5_INLINE u64v multiply_even(u32v a, u32v b) {
#if GLM5_LEVEL >= 2
  return (u64v)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif GLM5_LEVEL == 1
  return (u64v)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (u64v)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return ((u64v)a & 0xffffffffu) * ((u64v)b & 0xffffffffu);
#endif
}

// The halves of the 64-bit products of lanes with one multiplier.
GLM5_INLINE void multiply_wide(u32v a, uint32_t multiplier, u32v* high, u32v* low) {
  const u32v m = u32v{} + multiplier;
  const u64v even = multiply_even(a, m), odd = multiply_even((u32v)((u64v)a >> 32), m);
  *high = (u32v)((even >> 32) | (odd & 0xffffffff00000000u));
  *low = (u32v)((even & 0xffffffffu) | (odd << 32));
}

// Ten rounds in place, one counter a lane.
GLM5_INLINE void philox4x32(u32v c[4], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    u32v high0, low0, high1, low1;
    multiply_wide(c[0], 0xd2511f53u, &high0, &low0);
    multiply_wide(c[2], 0xcd9e8d57u, &high1, &low1);
    c[0] = high1 ^ c[1] ^ key0;
    c[1] = low1;
    c[2] = high0 ^ c[3] ^ key1;
    c[3] = low0;
    key0 += 0x9e3779b9u, key1 += 0xbb67ae85u;
  }
}

// ln x of positive normal numbers, within 2 ulp, also of the small results near 1.
GLM5_INLINE f32v log_of_normal(f32v x) {
  // x = 2^e * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); ln(1 + f) = 2 atanh(s) with s = f / (2 + f), written as
  // f minus a correction so that small f keep their precision.
  const u32v bits = (u32v)x;
  const i32v e = (i32v)(bits - 0x3f3504f3u) >> 23;
  const f32v f = (f32v)(bits - ((u32v)e << 23)) - 1.0f;
  const f32v s = f / (2.0f + f), z = s * s, half = 0.5f * f * f;
  f32v r = broadcast(2.0f / 9);
  r = fma(r, z, broadcast(2.0f / 7));
  r = fma(r, z, broadcast(2.0f / 5));
  r = fma(r, z, broadcast(2.0f / 3)) * z;
  const f32v n = __builtin_convertvector(e, f32v);
  return n * 0x1.63p-1f - ((half - (s * (half + r) + n * -0x1.bd0106p-13f)) - f);  // ln 2 in two parts
}

// g = -ln(-ln(1 - v)) with v = min((word + 0.5) * 2^-32, 1 - 2^-24): small v, the likely winners, keep precision.
GLM5_INLINE f32v gumbel_of(u32v word) {
  // Both halves and the product are exact: the sum rounds once, as a conversion does.
  const f32v high = __builtin_convertvector((i32v)(word >> 16), f32v);
  const f32v low = __builtin_convertvector((i32v)(word & 0xffffu), f32v);
  const f32v v = min(broadcast(1.0f - 0x1p-24f), ((high * 65536.0f + low) + 0.5f) * 0x1p-32f);
  // ln(1 - v) = ln(u) + (what the rounding of u = 1 - v lost) / u
  const f32v u = 1.0f - v;
  const f32v lost = (1.0f - u) - v;
  return -log_of_normal(-(log_of_normal(u) + lost / u));
}

// Noise of tokens [first, first + kNoiseTokens), first a multiple of 4.
GLM5_INLINE void gumbel_noise(int64_t seed, int64_t position, int64_t first, float* noise) {
  const uint64_t key = static_cast<uint64_t>(seed);
  u32v words[4] = {u32v{} + static_cast<uint32_t>(position), (u32v)lane_index() + static_cast<uint32_t>(first / 4),
                   u32v{} + kDraw, u32v{}};
  philox4x32(words, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
  for (int j = 0; j < 4; ++j) {
    const f32v g = gumbel_of(words[j]);
    for (int lane = 0; lane < kLanes; ++lane) noise[4 * lane + j] = g[lane];
  }
}

}  // namespace glm5::GLM5_LEVEL_NS
