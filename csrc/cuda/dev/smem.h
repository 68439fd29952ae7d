// Shared memory: arrays cut from what the launch gave, and pointers into them.
#pragma once

#include "cuda/dev/platform.h"

#if defined(GLM5_CUDA_SIM)

#include "sim/cuda/shared.h"

namespace glm5::dev {
using sim::atomic_add;
using sim::load_wide;
using sim::Shared;
using sim::SharedMemory;
using sim::store_wide;
}  // namespace glm5::dev
#define GLM5_SHARED_MEMORY(name) ::glm5::dev::SharedMemory name

#else

namespace glm5::dev {

template <class T>
struct Shared {
  T* p;
  template <class I>
  GLM5_DEVICE T& operator[](I i) const {
    return p[i];
  }
  template <class I>
  GLM5_DEVICE Shared operator+(I n) const {
    return Shared{p + n};
  }
  GLM5_DEVICE T* raw() const { return p; }
};

struct SharedMemory {
  unsigned char* base;
  u32 used;
  template <class T>
  GLM5_DEVICE Shared<T> array(u32 count) {
    used = (used + 15u) / 16u * 16u;
    T* p = reinterpret_cast<T*>(base + used);
    used += count * static_cast<u32>(sizeof(T));
    return Shared<T>{p};
  }
  GLM5_DEVICE void align(u32 bytes) { used = (used + bytes - 1) / bytes * bytes; }
};

template <class V, class T>
GLM5_DEVICE V load_wide(Shared<T> from) {
  return *reinterpret_cast<const V*>(from.p);
}
template <class V, class T>
GLM5_DEVICE void store_wide(Shared<T> to, const V& value) {
  *reinterpret_cast<V*>(to.p) = value;
}
template <class T>
GLM5_DEVICE T atomic_add(Shared<T> to, T value) {
  return atomicAdd(to.p, value);
}
template <class T>
GLM5_DEVICE T atomic_add(T* to, T value) {
  return atomicAdd(to, value);
}

}  // namespace glm5::dev
#define GLM5_SHARED_MEMORY(name)                                   \
  extern __shared__ __align__(1024) unsigned char glm5_dynamic_[]; \
  ::glm5::dev::SharedMemory name{glm5_dynamic_, 0u}

#endif

namespace glm5::dev {

// How much a sequence of arrays takes: the same arithmetic as SharedMemory's.
struct SharedBytes {
  u32 used = 0;
  template <class T>
  GLM5_BOTH constexpr SharedBytes array(u32 count) const {
    SharedBytes next;
    next.used = (used + 15u) / 16u * 16u + count * static_cast<u32>(sizeof(T));
    return next;
  }
};

}  // namespace glm5::dev
