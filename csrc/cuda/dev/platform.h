// One dialect for three compilers: nvcc, NVRTC (no standard headers) and g++ against sim/cuda.
#pragma once

#if defined(GLM5_CUDA_SIM)

#include <cmath>
#include <cstring>

#include "sim/cuda/block.h"
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

#elif !defined(__CUDACC_RTC__)

#include <cstring>

#endif

#if !defined(GLM5_CUDA_SIM)
#define GLM5_UNROLL _Pragma("unroll")
#else
#define GLM5_UNROLL
#endif
#define GLM5_DEVICE __device__ __forceinline__
#define GLM5_BOTH __host__ __device__ __forceinline__

namespace glm5::dev {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr u32 kAllLanes = 0xffffffffu;

struct bf16 {
  u16 bits;
};
// What one thread moves at once.
struct alignas(16) Wide {
  u32 word[4];
};

GLM5_BOTH float float_of(u32 bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
#endif
}
GLM5_BOTH u32 bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  u32 bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

GLM5_BOTH float infinity() {
  return float_of(0x7f800000u);
}

GLM5_BOTH float widen(float x) {
  return x;
}
GLM5_BOTH float widen(bf16 x) {
  return float_of(static_cast<u32>(x.bits) << 16);
}
// Round to nearest, ties to even; NaN stays one.
template <class T>
GLM5_BOTH T narrow(float x);
template <>
GLM5_BOTH float narrow<float>(float x) {
  return x;
}
template <>
GLM5_BOTH bf16 narrow<bf16>(float x) {
  const u32 bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<u16>(bits >> 16 | 0x40u)};
  return bf16{static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
// x as it would come back from an activation.
template <class T>
GLM5_BOTH float round_to(float x) {
  return widen(narrow<T>(x));
}
GLM5_BOTH u32 pack(bf16 low, bf16 high) {
  return static_cast<u32>(low.bits) | static_cast<u32>(high.bits) << 16;
}

// e4m3fn: 4 exponent bits with a bias of 7, 3 mantissa bits, 0x7f is NaN. Exact, also as bf16.
GLM5_BOTH float float_of_e4m3(u32 code) {
  const u32 magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
  const u32 normal = magnitude == 0x7fu ? 0x7fc00000u : (magnitude << 20) + (120u << 23);
  const u32 small = bits_of(static_cast<float>(magnitude) * 0.001953125f);
  return float_of(sign | (magnitude < 8u ? small : normal));
}

// Products and sums are fused only where it says so: the build turns the compiler's choice off.
GLM5_DEVICE float fused(float a, float b, float c) {
#if defined(GLM5_CUDA_SIM)
  return __builtin_fmaf(a, b, c);
#else
  return __fmaf_rn(a, b, c);
#endif
}
GLM5_DEVICE float larger(float a, float b) {
  return fmaxf(a, b);
}
GLM5_DEVICE float exponential(float x) {
  return expf(x);
}
GLM5_DEVICE float logarithm(float x) {
  return logf(x);
}
GLM5_DEVICE float square_root(float x) {
  return sqrtf(x);
}

GLM5_BOTH constexpr int divide_up(int a, int b) {
  return (a + b - 1) / b;
}
GLM5_BOTH constexpr int round_up(int a, int b) {
  return (a + b - 1) / b * b;
}
template <class T>
GLM5_BOTH constexpr T least(T a, T b) {
  return a < b ? a : b;
}

// Which thread this is.
#if defined(GLM5_CUDA_SIM)
GLM5_DEVICE int thread_index() {
  return static_cast<int>(sim::Block::current()->thread().linear);
}
GLM5_DEVICE int block_x() {
  return static_cast<int>(sim::Block::current()->index().x);
}
GLM5_DEVICE int block_y() {
  return static_cast<int>(sim::Block::current()->index().y);
}
GLM5_DEVICE int block_z() {
  return static_cast<int>(sim::Block::current()->index().z);
}
GLM5_DEVICE int grid_z() {
  return static_cast<int>(sim::Block::current()->grid().z);
}
#else
GLM5_DEVICE int thread_index() {
  return static_cast<int>(threadIdx.x);
}
GLM5_DEVICE int block_x() {
  return static_cast<int>(blockIdx.x);
}
GLM5_DEVICE int block_y() {
  return static_cast<int>(blockIdx.y);
}
GLM5_DEVICE int block_z() {
  return static_cast<int>(blockIdx.z);
}
GLM5_DEVICE int grid_z() {
  return static_cast<int>(gridDim.z);
}
#endif
GLM5_DEVICE int lane_index() {
  return thread_index() & 31;
}
GLM5_DEVICE int warp_index() {
  return thread_index() >> 5;
}

// 16 bytes of global memory at once; the address must be a multiple of 16.
template <class T>
GLM5_DEVICE Wide load_16(const T* from) {
#if defined(GLM5_CUDA_SIM)
  Wide value;
  memcpy(&value, from, sizeof value);
  return value;
#else
  return *reinterpret_cast<const Wide*>(from);
#endif
}
template <class T>
GLM5_BOTH bool aligned_16(const T* p) {
  return (reinterpret_cast<u64>(p) & 15u) == 0;
}

}  // namespace glm5::dev
