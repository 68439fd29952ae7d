// Errors of the native layer: a sentence in the house form `<op>: <what> is <got>, needs <want>`.
#pragma once

#include <exception>
#include <string>

// Functions shared by translation units that are compiled for different instruction levels must leave no
// out-of-line copy: the linker would keep any one of them, and a baseline machine could end up in AVX-512 code.
#define GLM5_INLINE inline __attribute__((always_inline))

namespace glm5 {

// The caller broke an op's contract. The binding turns it into glm5sdk.core.errors.ContractError.
class ContractError : public std::exception {
 public:
  explicit ContractError(std::string sentence);
  ~ContractError() override;
  const char* what() const noexcept override;

 private:
  std::string sentence_;
};

// Throws ContractError with a printf-formatted sentence.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2), cold));

// Throws ContractError(sentence) unless `ok`.
GLM5_INLINE void require(bool ok, const char* sentence) {
  if (__builtin_expect(!ok, 0)) fail("%s", sentence);
}

}  // namespace glm5
