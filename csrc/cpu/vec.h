// One vector of f32 lanes per instruction level, and the 16-bit storage types around it.
//
// Tails run through the same functions as the body: pass `Full{}` or `Part{n}`; lanes past n read as +0 and are
// never written. Operators + - * / and comparisons come from the compiler's vector types.
#pragma once

#include <cstdint>
#include <cstring>

#include "glm5/tensor.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace glm5::GLM5_LEVEL_NS {

#if GLM5_LEVEL >= 2
constexpr int kLanes = 16;
#elif GLM5_LEVEL == 1
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float f32v __attribute__((vector_size(4 * kLanes)));
typedef int32_t i32v __attribute__((vector_size(4 * kLanes)));
typedef uint32_t u32v __attribute__((vector_size(4 * kLanes)));
typedef uint16_t u16v __attribute__((vector_size(2 * kLanes)));

struct Full {};
struct Part {
  int n;  // 1 .. kLanes - 1 lanes are real
};

GLM5_INLINE f32v broadcast(float value) {
  return value - f32v{};
}
GLM5_INLINE i32v lane_index() {
  i32v index{};
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  return index;
}

// a * b + c: one rounding where the level has the instruction, two on the baseline.
GLM5_INLINE f32v fma(f32v a, f32v b, f32v c) {
#if GLM5_LEVEL >= 2
  return _mm512_fmadd_ps(a, b, c);
#elif GLM5_LEVEL == 1
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// The larger or smaller of the two; b when either is NaN.
GLM5_INLINE f32v max(f32v a, f32v b) {
#if GLM5_LEVEL >= 2
  return _mm512_max_ps(a, b);
#elif GLM5_LEVEL == 1
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
GLM5_INLINE f32v min(f32v a, f32v b) {
#if GLM5_LEVEL >= 2
  return _mm512_min_ps(a, b);
#elif GLM5_LEVEL == 1
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// v in the first lanes, `fill` past the real ones.
GLM5_INLINE f32v fill_past(f32v v, Full, float) {
  return v;
}
GLM5_INLINE f32v fill_past(f32v v, Part part, float fill) {
  return lane_index() < part.n ? v : broadcast(fill);
}

// ---- f32 <-> 16-bit, a vector of values held as f32 or as bits ----

GLM5_INLINE f32v from_bits(bf16, u16v bits) {
#if GLM5_LEVEL >= 2
  return (f32v)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
#elif GLM5_LEVEL == 1
  return (f32v)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)bits), 16);
#elif defined(__x86_64__)
  int64_t all;
  std::memcpy(&all, &bits, sizeof all);
  return (f32v)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_cvtsi64_si128(all));
#else
  return (f32v)(__builtin_convertvector(bits, u32v) << 16);
#endif
}

// The bits of a value rounded to nearest even in the upper half, where a bf16 has all of them.
GLM5_INLINE u32v round_upper_half(f32v v) {
  const u32v bits = (u32v)v;
  const u32v rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  return v == v ? rounded : (bits & 0xffff0000u) | 0x400000u;  // a NaN stays one
}
GLM5_INLINE u16v to_bits(bf16, f32v v) {
  return __builtin_convertvector(round_upper_half(v) >> 16, u16v);
}

#if GLM5_LEVEL >= 1
GLM5_INLINE f32v from_bits(f16, u16v bits) {
#if GLM5_LEVEL >= 2
  return _mm512_cvtph_ps((__m256i)bits);
#else
  return _mm256_cvtph_ps((__m128i)bits);
#endif
}
GLM5_INLINE u16v to_bits(f16, f32v v) {
#if GLM5_LEVEL >= 2
  return (u16v)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  return (u16v)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
}
#else
GLM5_INLINE f32v from_bits(f16, u16v half) {
  const u32v bits = __builtin_convertvector(half, u32v);
  const u32v sign = (bits & 0x8000u) << 16;
  const u32v magnitude = bits & 0x7fffu;
  // Shifted into place the exponent is 112 too small; a power of two mends it exactly, denormals included.
  const u32v finite = (u32v)((f32v)(magnitude << 13) * 0x1p112f);
  const u32v special = (magnitude << 13) | 0x7f800000u;
  return (f32v)(sign | (magnitude >= 0x7c00u ? special : finite));
}
GLM5_INLINE u16v to_bits(f16, f32v v) {
  const u32v bits = (u32v)v;
  const u32v sign = (bits >> 16) & 0x8000u;
  const u32v magnitude = bits & 0x7fffffffu;
  // Normal results: round the mantissa to nearest even, then move the exponent's bias from 127 to 15.
  const u32v normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  // Denormal results: adding 0.5 puts the last kept bit at 2^-24, and the addition rounds.
  const u32v denormal = (u32v)((f32v)magnitude + 0.5f) - 0x3f000000u;
  const u32v special = 0x7c00u | (magnitude > 0x7f800000u ? 0x200u | ((magnitude >> 13) & 0x3ffu) : u32v{});
  u32v half = magnitude < 0x38800000u ? denormal : normal;
  half = magnitude >= 0x477ff000u ? u32v{} + 0x7c00u : half;  // rounds past the largest finite value
  half = magnitude >= 0x7f800000u ? special : half;
  return __builtin_convertvector(sign | half, u16v);
}
#endif

// The value after one rounding to T, still held as f32.
GLM5_INLINE f32v round_to_type(float, f32v v) {
  return v;
}
GLM5_INLINE f32v round_to_type(bf16, f32v v) {
  return (f32v)round_upper_half(v);  // without the way through 16 bits
}
GLM5_INLINE f32v round_to_type(f16, f32v v) {
  return from_bits(f16{}, to_bits(f16{}, v));
}
template <class T>
GLM5_INLINE f32v round_to(f32v v) {
  return round_to_type(T{}, v);
}

// ---- memory ----

GLM5_INLINE f32v load(const float* p, Full = {}) {
  f32v v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
GLM5_INLINE void store(float* p, f32v v, Full = {}) {
  std::memcpy(p, &v, sizeof v);
}

GLM5_INLINE f32v load(const float* p, Part part) {
#if GLM5_LEVEL >= 2
  return _mm512_maskz_loadu_ps((1u << part.n) - 1, p);
#elif GLM5_LEVEL == 1
  return _mm256_maskload_ps(p, (__m256i)(lane_index() < part.n));
#else
  f32v v{};
  for (int i = 0; i < kLanes - 1; ++i) {
    if (i < part.n) v[i] = p[i];
  }
  return v;
#endif
}
GLM5_INLINE void store(float* p, f32v v, Part part) {
#if GLM5_LEVEL >= 2
  _mm512_mask_storeu_ps(p, (1u << part.n) - 1, v);
#elif GLM5_LEVEL == 1
  _mm256_maskstore_ps(p, (__m256i)(lane_index() < part.n), v);
#else
  for (int i = 0; i < kLanes - 1; ++i) {
    if (i < part.n) p[i] = v[i];
  }
#endif
}

GLM5_INLINE u16v load_bits(const void* p, Full) {
  u16v bits;
  std::memcpy(&bits, p, sizeof bits);
  return bits;
}
GLM5_INLINE u16v load_bits(const void* p, Part part) {
#if GLM5_LEVEL >= 2
  return (u16v)_mm256_maskz_loadu_epi16((1u << part.n) - 1, p);
#else
  uint16_t lanes[kLanes] = {};
  const auto* bytes = static_cast<const char*>(p);  // rows of byte caches may begin at odd addresses
  for (int i = 0; i < kLanes - 1; ++i) {
    if (i < part.n) std::memcpy(lanes + i, bytes + 2 * i, 2);
  }
  return load_bits(lanes, Full{});
#endif
}
GLM5_INLINE void store_bits(void* p, u16v bits, Full) {
  std::memcpy(p, &bits, sizeof bits);
}
GLM5_INLINE void store_bits(void* p, u16v bits, Part part) {
#if GLM5_LEVEL >= 2
  _mm256_mask_storeu_epi16(p, (1u << part.n) - 1, (__m256i)bits);
#else
  auto* bytes = static_cast<char*>(p);
  for (int i = 0; i < kLanes - 1; ++i) {
    const uint16_t lane = bits[i];
    if (i < part.n) std::memcpy(bytes + 2 * i, &lane, 2);
  }
#endif
}

template <class Lanes = Full>
GLM5_INLINE f32v load(const bf16* p, Lanes lanes = {}) {
  return from_bits(bf16{}, load_bits(p, lanes));
}
template <class Lanes = Full>
GLM5_INLINE f32v load(const f16* p, Lanes lanes = {}) {
  return from_bits(f16{}, load_bits(p, lanes));
}
template <class Lanes = Full>
GLM5_INLINE void store(bf16* p, f32v v, Lanes lanes = {}) {
  store_bits(p, to_bits(bf16{}, v), lanes);
}
template <class Lanes = Full>
GLM5_INLINE void store(f16* p, f32v v, Lanes lanes = {}) {
  store_bits(p, to_bits(f16{}, v), lanes);
}

// One element, converted through the vector path so that scalars and vectors agree bit for bit.
template <class T>
GLM5_INLINE float load_one(const T* p) {
  return load(p, Part{1})[0];
}
template <class T>
GLM5_INLINE void store_one(T* p, float value) {
  store(p, broadcast(value), Part{1});
}

// ---- walking a row ----

// f(i, lanes) for i = 0, kLanes, ...: `Full` for the body, one `Part` for the tail.
template <class F>
GLM5_INLINE void for_lanes(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, Full{});
  if (i < n) f(i, Part{static_cast<int>(n - i)});
}

// ---- reductions, always the same tree: upper half onto lower half until one lane is left ----

template <class Combine>
GLM5_INLINE float reduce_lanes(f32v v, Combine combine) {
#if GLM5_LEVEL >= 2
  v = combine(v, _mm512_shuffle_f32x4(v, v, 0x4e));
  v = combine(v, _mm512_shuffle_f32x4(v, v, 0xb1));
  v = combine(v, _mm512_permute_ps(v, 0x4e));
  v = combine(v, _mm512_permute_ps(v, 0xb1));
  return v[0];
#elif GLM5_LEVEL == 1
  v = combine(v, _mm256_permute2f128_ps(v, v, 0x01));
  v = combine(v, _mm256_permute_ps(v, 0x4e));
  v = combine(v, _mm256_permute_ps(v, 0xb1));
  return v[0];
#else
  v = combine(v, __builtin_shufflevector(v, v, 2, 3, 0, 1));
  v = combine(v, __builtin_shufflevector(v, v, 1, 0, 3, 2));
  return v[0];
#endif
}
GLM5_INLINE float reduce_add(f32v v) {
  return reduce_lanes(v, [](f32v a, f32v b) __attribute__((always_inline)) { return a + b; });
}
GLM5_INLINE float reduce_max(f32v v) {
  return reduce_lanes(v, [](f32v a, f32v b) __attribute__((always_inline)) { return max(a, b); });
}

// out[i] = reduce_add(v[i]) for four vectors at once, the same bits.
GLM5_INLINE void reduce_add4(f32v a, f32v b, f32v c, f32v d, float* out) {
#if GLM5_LEVEL >= 2
  const __m512 ab = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
  const __m512 cd = _mm512_shuffle_f32x4(c, d, 0x44) + _mm512_shuffle_f32x4(c, d, 0xee);
  __m512 v = _mm512_shuffle_f32x4(ab, cd, 0x88) + _mm512_shuffle_f32x4(ab, cd, 0xdd);
  v = v + _mm512_permute_ps(v, 0x4e);
  v = v + _mm512_permute_ps(v, 0xb1);
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, v)));
#elif GLM5_LEVEL == 1
  const __m256 ab = _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
  const __m256 cd = _mm256_permute2f128_ps(c, d, 0x20) + _mm256_permute2f128_ps(c, d, 0x31);
  __m256 v = _mm256_shuffle_ps(ab, cd, 0x44) + _mm256_shuffle_ps(ab, cd, 0xee);
  v = v + _mm256_permute_ps(v, 0xb1);
  out[0] = v[0], out[1] = v[4], out[2] = v[2], out[3] = v[6];
#elif defined(__x86_64__)
  const __m128 ab = _mm_shuffle_ps(a, b, 0x44) + _mm_shuffle_ps(a, b, 0xee);
  const __m128 cd = _mm_shuffle_ps(c, d, 0x44) + _mm_shuffle_ps(c, d, 0xee);
  _mm_storeu_ps(out, _mm_shuffle_ps(ab, cd, 0x88) + _mm_shuffle_ps(ab, cd, 0xdd));
#else
  out[0] = reduce_add(a), out[1] = reduce_add(b), out[2] = reduce_add(c), out[3] = reduce_add(d);
#endif
}

// Folds a row into four chains (vector number modulo four), ascending, then adds the chains and their lanes in a
// fixed tree. step(chain, i, lanes) returns the chain with vector i added; the order depends on n alone.
template <class Step>
GLM5_INLINE float sum_row(int64_t n, Step&& step) {
  f32v chain[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int c = 0; c < 4; ++c) chain[c] = step(chain[c], i + c * kLanes, Full{});
  }
  // What is left is at most three vectors and a tail, which continue the chains in order.
  int c = 0;
  for_lanes(n - i, [&](int64_t j, auto lanes) __attribute__((always_inline)) {
    const f32v next = step(c == 0 ? chain[0] : c == 1 ? chain[1] : c == 2 ? chain[2] : chain[3], i + j, lanes);
    (c == 0 ? chain[0] : c == 1 ? chain[1] : c == 2 ? chain[2] : chain[3]) = next;
    ++c;
  });
  return reduce_add((chain[0] + chain[1]) + (chain[2] + chain[3]));
}

}  // namespace glm5::GLM5_LEVEL_NS
