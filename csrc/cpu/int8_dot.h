// Exact integer products of bytes: 4 or 2 of them a lane, summed in 32 bits. Every level gives the same integers.
//
// Activations are held as `Quant`, widened where the level multiplies 16-bit integers; weights are read as they lie.
#pragma once

#include "cpu/vec.h"

namespace glm5::GLM5_LEVEL_NS {

#if GLM5_LEVEL >= 3
using Quant = int8_t;
constexpr int kDotStep = 64;  // elements of one vector
typedef __m512i wvec;
typedef __m512i xvec;
#elif GLM5_LEVEL == 2
using Quant = int16_t;
constexpr int kDotStep = 32;
typedef __m256i wvec;
typedef __m512i xvec;
#elif GLM5_LEVEL == 1
using Quant = int16_t;
constexpr int kDotStep = 16;
typedef __m128i wvec;
typedef __m256i xvec;
#else
using Quant = int16_t;
constexpr int kDotStep = 8;
typedef int8_t wvec __attribute__((vector_size(8)));
typedef int16_t xvec __attribute__((vector_size(16)));
#endif
constexpr int64_t kMostTerms = int64_t{1} << 17;  // of one sum: 127 * 128 * 2^17 stays below 2^31

// With 8-bit dot products one factor is unsigned: the weight, 128 or 8 too large, which a row's own sum mends.
constexpr bool kUnsignedWeights = GLM5_LEVEL >= 3;

GLM5_INLINE xvec load_x(const Quant* p) {
  xvec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// kDotStep bytes, the first n of them real, 0 after.
GLM5_INLINE wvec load_w(const void* p, Full = {}) {
  wvec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
GLM5_INLINE wvec load_w(const void* p, Part part) {
#if GLM5_LEVEL >= 3
  return _mm512_maskz_loadu_epi8((uint64_t{1} << part.n) - 1, p);
#elif GLM5_LEVEL == 2
  return _mm256_maskz_loadu_epi8((1u << part.n) - 1, p);
#else
  uint8_t bytes[kDotStep] = {};
  for (int i = 0; i < kDotStep - 1; ++i) {
    if (i < part.n) bytes[i] = static_cast<const uint8_t*>(p)[i];
  }
  return load_w(bytes, Full{});
#endif
}

// What `dot` takes: signed bytes widened, or bytes with 128 added.
#if GLM5_LEVEL >= 3
typedef __m512i wide_w;
#else
typedef xvec wide_w;
#endif
GLM5_INLINE wide_w widen_w(wvec w) {
#if GLM5_LEVEL >= 3
  return _mm512_xor_si512(w, _mm512_set1_epi8(-128));
#elif GLM5_LEVEL == 2
  return _mm512_cvtepi8_epi16(w);
#elif GLM5_LEVEL == 1
  return _mm256_cvtepi8_epi16(w);
#elif defined(__x86_64__)
  int64_t all;
  std::memcpy(&all, &w, sizeof all);
  return (xvec)_mm_srai_epi16(_mm_unpacklo_epi8(_mm_setzero_si128(), _mm_cvtsi64_si128(all)), 8);
#else
  return __builtin_convertvector(w, xvec);
#endif
}

// The two int4 of each byte, the even elements and the odd ones: signed and widened, or bytes with 8 added.
GLM5_INLINE void split_w(wvec w, wide_w* even, wide_w* odd) {
#if GLM5_LEVEL >= 3
  const __m512i low = _mm512_set1_epi8(15);
  w = _mm512_xor_si512(w, _mm512_set1_epi8(static_cast<char>(0x88)));
  *even = _mm512_and_si512(w, low);
  *odd = _mm512_and_si512(_mm512_srli_epi16(w, 4), low);
#elif GLM5_LEVEL == 2
  const __m512i wide = _mm512_cvtepi8_epi16(w);
  *even = _mm512_srai_epi16(_mm512_slli_epi16(wide, 12), 12);
  *odd = _mm512_srai_epi16(wide, 4);
#elif GLM5_LEVEL == 1
  const __m256i wide = _mm256_cvtepi8_epi16(w);
  *even = _mm256_srai_epi16(_mm256_slli_epi16(wide, 12), 12);
  *odd = _mm256_srai_epi16(wide, 4);
#else
  const xvec wide = widen_w(w);
  *even = (wide << 12) >> 12;
  *odd = wide >> 4;
#endif
}

// sum + w . x, each lane its own terms.
GLM5_INLINE i32v dot(i32v sum, wide_w w, xvec x) {
#if GLM5_LEVEL >= 3
  return (i32v)_mm512_dpbusd_epi32((__m512i)sum, w, x);
#elif GLM5_LEVEL == 2
  return sum + (i32v)_mm512_madd_epi16(w, x);
#elif GLM5_LEVEL == 1
  return sum + (i32v)_mm256_madd_epi16(w, x);
#elif defined(__x86_64__)
  return sum + (i32v)_mm_madd_epi16((__m128i)w, (__m128i)x);
#else
  for (int i = 0; i < kLanes; ++i) sum[i] += w[2 * i] * x[2 * i] + w[2 * i + 1] * x[2 * i + 1];
  return sum;
#endif
}

// out[i] = the sum of the lanes of v[i], for four vectors.
GLM5_INLINE void sum_lanes4(const i32v* v, int32_t* out) {
#if GLM5_LEVEL >= 2
  const __m512i a = (__m512i)v[0], b = (__m512i)v[1], c = (__m512i)v[2], d = (__m512i)v[3];
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  _mm_storeu_si128((__m128i*)out, _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
#elif GLM5_LEVEL == 1
  const __m256i a = (__m256i)v[0], b = (__m256i)v[1], c = (__m256i)v[2], d = (__m256i)v[3];
  const __m256i ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const __m256i cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  const __m256i all = _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  _mm_storeu_si128((__m128i*)out, _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
#else
  for (int i = 0; i < 4; ++i) out[i] = (v[i][0] + v[i][2]) + (v[i][1] + v[i][3]);
#endif
}

}  // namespace glm5::GLM5_LEVEL_NS
