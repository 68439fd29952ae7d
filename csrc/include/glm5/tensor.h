// A borrowed, contiguous tensor: DLPack's struct with typed, checked access.
#pragma once

#include <cstdint>

#include "glm5/check.h"
#include "glm5/dlpack.h"

namespace glm5 {

// 16-bit floats are storage only; arithmetic happens in f32.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

enum class DType : int { f32, bf16, f16, f64, i32, i64, u8, i8, boolean, f8_e4m3, other };

// "f32", "bf16", ... for error messages.
const char* dtype_name(DType dtype);

template <class T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_of<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of<f16> {
  static constexpr DType value = DType::f16;
};
template <>
struct dtype_of<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct dtype_of<int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct dtype_of<int64_t> {
  static constexpr DType value = DType::i64;
};
template <>
struct dtype_of<uint8_t> {
  static constexpr DType value = DType::u8;
};
template <>
struct dtype_of<int8_t> {
  static constexpr DType value = DType::i8;
};

class TensorView {
 public:
  TensorView() = default;
  GLM5_INLINE TensorView(const DLTensor& tensor, bool read_only) : tensor_(tensor), read_only_(read_only) {}

  GLM5_INLINE int ndim() const { return tensor_.ndim; }
  // Size of axis `axis`; negative axes count from the end.
  GLM5_INLINE int64_t dim(int axis) const { return tensor_.shape[axis < 0 ? axis + tensor_.ndim : axis]; }
  GLM5_INLINE int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < tensor_.ndim; ++i) n *= tensor_.shape[i];
    return n;
  }
  // Product of all axes but the last: the rows of a tensor seen as a matrix.
  GLM5_INLINE int64_t rows() const {
    int64_t n = 1;
    for (int i = 0; i + 1 < tensor_.ndim; ++i) n *= tensor_.shape[i];
    return n;
  }

  GLM5_INLINE DType dtype() const {
    const DLDataType t = tensor_.dtype;
    if (t.code == kDLFloat)
      return t.bits == 32 ? DType::f32 : t.bits == 16 ? DType::f16 : t.bits == 64 ? DType::f64 : DType::other;
    if (t.code == kDLBfloat) return t.bits == 16 ? DType::bf16 : DType::other;
    if (t.code == kDLInt)
      return t.bits == 32 ? DType::i32 : t.bits == 64 ? DType::i64 : t.bits == 8 ? DType::i8 : DType::other;
    if (t.code == kDLUInt) return t.bits == 8 ? DType::u8 : DType::other;
    if (t.code == kDLBool) return DType::boolean;
    if (t.code == kDLFloat8_e4m3fn) return DType::f8_e4m3;
    return DType::other;
  }

  // The elements, for reading; throws unless the dtype is T.
  template <class T>
  GLM5_INLINE const T* data() const {
    if (__builtin_expect(dtype() != dtype_of<T>::value, 0)) wrong_dtype(dtype_of<T>::value);
    return reinterpret_cast<const T*>(bytes());
  }
  // The elements, for writing; throws unless the dtype is T and the producer allows writes.
  template <class T>
  GLM5_INLINE T* out() const {
    if (__builtin_expect(read_only_, 0)) fail("native kernel: an output is read-only, needs a writable tensor");
    return const_cast<T*>(data<T>());
  }

  const DLTensor& raw() const { return tensor_; }

 private:
  GLM5_INLINE char* bytes() const { return static_cast<char*>(tensor_.data) + tensor_.byte_offset; }
  [[noreturn]] void wrong_dtype(DType want) const;

  DLTensor tensor_{};
  bool read_only_ = false;
};

// Calls f(T{}) with T = float, bf16 or f16 as `dtype` says; throws a sentence naming `what` for any other dtype.
// Levels of bf16 products are compiled for bf16 alone (cpu/kernel.h).
template <class F>
GLM5_INLINE void for_float_type(const char* what, DType dtype, F&& f) {
  switch (dtype) {
#if !(GLM5_HAS_BF16 && GLM5_LEVEL >= 4)
    case DType::f32:
      return f(float{});
    case DType::f16:
      return f(f16{});
#endif
    case DType::bf16:
      return f(bf16{});
    default:
      fail("%s is %s, needs f32, bf16 or f16", what, dtype_name(dtype));
  }
}

}  // namespace glm5
