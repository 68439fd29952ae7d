// Of the launchers: tensors as typed device pointers.
#pragma once

#include "cuda/dev/platform.h"
#include "glm5/tensor.h"

namespace glm5::cuda {

template <class T>
struct stored {
  using type = T;
};
template <>
struct stored<dev::bf16> {
  using type = glm5::bf16;
};

template <class T>
const T* in(const TensorView& tensor) {
  return reinterpret_cast<const T*>(tensor.data<typename stored<T>::type>());
}
template <class T>
T* out(const TensorView& tensor) {
  return reinterpret_cast<T*>(tensor.out<typename stored<T>::type>());
}

// Calls f(T{}) with T = float or bf16, what these kernels compute in.
template <class F>
void for_type(const char* what, DType dtype, F&& f) {
  if (dtype == DType::f32) return f(float{});
  if (dtype == DType::bf16) return f(dev::bf16{});
  fail("%s is %s, needs f32 or bf16", what, dtype_name(dtype));
}

}  // namespace glm5::cuda
