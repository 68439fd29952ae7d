// Per-thread scratch memory that is kept between calls: kernels allocate nothing on their hot path.
#pragma once

#include <cstddef>
#include <cstdint>

#include "glm5/check.h"

namespace glm5 {

// A frame on this thread's scratch stack. What was taken stays valid until the frame ends; frames may nest.
class Scratch {
 public:
  Scratch();
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // `count` uninitialised elements, aligned to 64 bytes.
  template <class T>
  GLM5_INLINE T* take(int64_t count) {
    return static_cast<T*>(take_bytes(static_cast<size_t>(count) * sizeof(T)));
  }

 private:
  void* take_bytes(size_t bytes);
  size_t block_;
  size_t used_;
};

}  // namespace glm5
