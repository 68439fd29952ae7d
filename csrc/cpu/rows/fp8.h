// e4m3fn: 1 sign, 4 exponent and 3 mantissa bits, largest value 448, no infinities, 0x7f is NaN.
#pragma once

#include "cpu/vec.h"

namespace glm5::GLM5_LEVEL_NS {

typedef uint8_t u8v __attribute__((vector_size(kLanes)));

constexpr float kFp8Max = 448.0f;
constexpr float kFp8SmallestAmax = 1e-4f;  // a row of zeros still has a positive scale
constexpr int64_t kFp8Group = 128;         // latent values that share one scale

GLM5_INLINE u8v load_bytes(const uint8_t* p, Full) {
  u8v v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
GLM5_INLINE u8v load_bytes(const uint8_t* p, Part part) {
#if GLM5_LEVEL >= 2
  return (u8v)_mm_maskz_loadu_epi8((1u << part.n) - 1, p);
#else
  uint8_t lanes[kLanes] = {};
  for (int i = 0; i < kLanes - 1; ++i) {
    if (i < part.n) lanes[i] = p[i];
  }
  return load_bytes(lanes, Full{});
#endif
}
GLM5_INLINE void store_bytes(uint8_t* p, u8v v, Full) {
  std::memcpy(p, &v, sizeof v);
}
GLM5_INLINE void store_bytes(uint8_t* p, u8v v, Part part) {
#if GLM5_LEVEL >= 2
  _mm_mask_storeu_epi8(p, (1u << part.n) - 1, (__m128i)v);
#else
  for (int i = 0; i < kLanes - 1; ++i) {
    if (i < part.n) p[i] = v[i];
  }
#endif
}

// Spelled out per level: GCC 12 takes the vector apart for __builtin_convertvector.
GLM5_INLINE u32v widen_bytes(u8v v) {
#if GLM5_LEVEL >= 2
  return (u32v)_mm512_cvtepu8_epi32((__m128i)v);
#elif GLM5_LEVEL == 1
  return (u32v)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)v));
#elif defined(__x86_64__)
  int bits;
  std::memcpy(&bits, &v, sizeof bits);
  const __m128i zero = _mm_setzero_si128();
  return (u32v)_mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(bits), zero), zero);
#else
  return __builtin_convertvector(v, u32v);
#endif
}
GLM5_INLINE u8v narrow_to_bytes(u32v v) {
#if GLM5_LEVEL >= 2
  return (u8v)_mm512_cvtepi32_epi8((__m512i)v);
#else
  return __builtin_convertvector(v, u8v);
#endif
}

// The values of a vector of codes; exact.
GLM5_INLINE f32v from_fp8(u8v codes) {
  const u32v bits = widen_bytes(codes);
  const u32v sign = (bits & 0x80u) << 24;
  const u32v magnitude = bits & 0x7fu;
  const u32v normal = (magnitude << 20) + (120u << 23);  // the exponent's bias is 127 instead of 7
  const u32v denormal = (u32v)(__builtin_convertvector((i32v)magnitude, f32v) * 0x1p-9f);
  u32v value = magnitude < 8u ? denormal : normal;
  value = magnitude == 0x7fu ? u32v{} + 0x7fc00000u : value;
  return (f32v)(sign | value);
}

// The nearest codes, ties to even; what is too large becomes +-448, NaN stays NaN.
GLM5_INLINE u8v to_fp8(f32v v) {
  const u32v bits = (u32v)v;
  const u32v sign = (bits >> 24) & 0x80u;
  const u32v magnitude = bits & 0x7fffffffu;
  const u32v normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 codes are 2^-9 apart: adding 2^14 puts that at the last bit, and the addition rounds.
  const u32v denormal = (u32v)((f32v)magnitude + 0x1p14f) - 0x46800000u;
  u32v code = magnitude < 0x3c800000u ? denormal : normal;
  code = magnitude >= 0x43e00000u ? u32v{} + 0x7eu : code;
  code = magnitude > 0x7f800000u ? u32v{} + 0x7fu : code;
  return narrow_to_bytes(sign | code);
}

// The largest |x| of n values; NaN when one is: magnitudes are compared as integers, where NaN is the largest.
template <class T>
GLM5_INLINE float largest_magnitude(const T* x, int64_t n) {
  u32v most{};
  for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    const u32v magnitude = (u32v)load(x + i, lanes) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  });
  uint32_t top = 0;
  for (int i = 0; i < kLanes; ++i) top = most[i] > top ? most[i] : top;
  float amax;
  std::memcpy(&amax, &top, sizeof amax);
  return amax;
}

// Codes of n values that share a scale, which is returned: max(largest magnitude, 1e-4) / 448.
template <class T>
GLM5_INLINE float quantise_fp8(const T* x, int64_t n, uint8_t* codes) {
  const float amax = largest_magnitude(x, n);
  const float scale = (amax < kFp8SmallestAmax ? kFp8SmallestAmax : amax) / kFp8Max;
  const f32v divisor = broadcast(scale);
  for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    store_bytes(codes + i, to_fp8(load(x + i, lanes) / divisor), lanes);
  });
  return scale;
}

// to[i] = code * scale, one product each.
GLM5_INLINE void dequantise_fp8(const uint8_t* codes, int64_t n, float scale, float* to) {
  const f32v factor = broadcast(scale);
  for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    store(to + i, from_fp8(load_bytes(codes + i, lanes)) * factor, lanes);
  });
}

}  // namespace glm5::GLM5_LEVEL_NS
