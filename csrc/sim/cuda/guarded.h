// Device memory of the simulator: a copy of each tensor that ends (or begins) at a page that nothing may touch.
#pragma once

#include <cstddef>
#include <vector>

#include "glm5/tensor.h"

namespace glm5::sim {

class Guarded {
 public:
  // Copies `tensor`; `name` is used in messages and must stay alive.
  Guarded(const TensorView& tensor, const char* name);
  ~Guarded();
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  // The copy, aligned to 16 bytes as a device's memory would be.
  const TensorView& view() const { return view_; }
  // What the kernel changed goes back to the tensor. Throws KernelFault when bytes around the copy were written.
  void copy_back();

  // ", 4 bytes behind the end of `out`" for an address near a tensor, nothing for others.
  static void describe(char* to, size_t size, const void* address);

 private:
  TensorView original_, view_;
  const char* name_;
  unsigned char *mapping_, *data_, *room_;
  size_t bytes_, room_bytes_;
};

}  // namespace glm5::sim
