#include "glm5/check.h"

#include <cstdarg>
#include <cstdio>
#include <utility>

#include "glm5/tensor.h"

namespace glm5 {

ContractError::ContractError(std::string sentence) : sentence_(std::move(sentence)) {}
ContractError::~ContractError() = default;
const char* ContractError::what() const noexcept {
  return sentence_.c_str();
}

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw ContractError(text);
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::f64:
      return "f64";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
    case DType::u8:
      return "u8";
    case DType::i8:
      return "i8";
    case DType::boolean:
      return "bool";
    case DType::f8_e4m3:
      return "f8_e4m3";
    case DType::other:
      break;
  }
  return "an unsupported dtype";
}

void TensorView::wrong_dtype(DType want) const {
  fail("native kernel: a tensor's dtype is %s, needs %s", dtype_name(dtype()), dtype_name(want));
}

}  // namespace glm5
