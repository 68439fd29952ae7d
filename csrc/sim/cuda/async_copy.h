// cp.async: 16 bytes from global to shared memory that arrive some time before they are waited for.
#pragma once

#include "sim/cuda/shared.h"

namespace glm5::sim {

// Copies `valid` of 16 bytes and zeros after them; `from` is not read when valid is 0.
void cp_async(Block& block, unsigned char* to, const unsigned char* from, unsigned valid, Site at);
void cp_async_commit(Block& block);
// Until at most `pending` groups of this thread are under way.
void cp_async_wait(Block& block, unsigned pending, Site at);

template <class T>
void cp_async_16(Shared<T> to, const T* from, bool there = true, GLM5_SIM_SITE) {
  Block& block = *Block::current();
  to.touch(Access::copy, 16, 16, at);
  cp_async(block, reinterpret_cast<unsigned char*>(to.raw()), reinterpret_cast<const unsigned char*>(from),
           there ? 16 : 0, at);
}
inline void cp_async_commit() {
  cp_async_commit(*Block::current());
}
template <int Pending>
void cp_async_wait(GLM5_SIM_SITE) {
  cp_async_wait(*Block::current(), Pending, at);
}

}  // namespace glm5::sim
