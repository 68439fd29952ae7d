// Pointers to shared memory that check and record every access.
#pragma once

#include <cstring>
#include <type_traits>

#include "sim/cuda/block.h"

namespace glm5::sim {

// An index that knows where it was written down.
struct Position {
  long long value;
  Site at;
  template <class I, class = std::enable_if_t<std::is_integral_v<I>>>
  Position(I i, const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : value(static_cast<long long>(i)), at{file, line} {}
};

template <class T>
class Element {
 public:
  Element(T* p, const T* begin, const T* end, Site at) : p_(p), begin_(begin), end_(end), at_(at) {}
  operator T() const {
    touch(Access::read);
    return *p_;
  }
  const Element& operator=(T value) const {
    touch(Access::write);
    *p_ = value;
    return *this;
  }
  const Element& operator=(const Element& other) const { return *this = static_cast<T>(other); }
  const Element& operator+=(T value) const { return *this = static_cast<T>(*this) + value; }
  const Element& operator*=(T value) const { return *this = static_cast<T>(*this) * value; }

 private:
  void touch(Access access) const { Block::current()->touch(access, p_, sizeof(T), begin_, end_, alignof(T), at_); }
  T* p_;
  const T *begin_, *end_;
  Site at_;
};

template <class T>
class Shared {
  static_assert(sizeof(T) >= RaceDetector::kGranule, "shared arrays have elements of two bytes or more");

 public:
  Shared() = default;
  Shared(T* p, T* begin, T* end) : p_(p), begin_(begin), end_(end) {}
  Element<T> operator[](Position i) const { return Element<T>(p_ + i.value, begin_, end_, i.at); }
  Shared operator+(long long n) const { return Shared(p_ + n, begin_, end_); }
  T* raw() const { return p_; }
  // For accesses of other sizes than one element's.
  void touch(Access access, size_t bytes, size_t alignment, Site at) const {
    Block::current()->touch(access, p_, bytes, begin_, end_, alignment, at);
  }

 private:
  T *p_ = nullptr, *begin_ = nullptr, *end_ = nullptr;
};

// Hands out a block's shared memory, array by array.
class SharedMemory {
 public:
  template <class T>
  Shared<T> array(size_t count, GLM5_SIM_SITE) {
    Block& block = *Block::current();
    const size_t begin = (used_ + 15) / 16 * 16, end = begin + count * sizeof(T);
    if (end > block.shared_bytes()) {
      block.fail_at(at, "shared memory: arrays up to here take %zu bytes, the launch gave %zu", end,
                    block.shared_bytes());
    }
    used_ = end;
    T* p = reinterpret_cast<T*>(block.shared() + begin);
    return Shared<T>(p, p, p + count);
  }
  // Arrays from here on begin at a multiple of `bytes`.
  void align(size_t bytes) { used_ = (used_ + bytes - 1) / bytes * bytes; }

 private:
  size_t used_ = 0;
};

// `bytes` bytes at once: 4, 8 or 16.
template <class V, class T>
V load_wide(Shared<T> from, GLM5_SIM_SITE) {
  from.touch(Access::read, sizeof(V), sizeof(V), at);
  V value;
  std::memcpy(&value, from.raw(), sizeof value);
  return value;
}
template <class V, class T>
void store_wide(Shared<T> to, const V& value, GLM5_SIM_SITE) {
  to.touch(Access::write, sizeof(V), sizeof(V), at);
  std::memcpy(to.raw(), &value, sizeof value);
}
// Threads of a block run one at a time: adding needs no lock.
template <class T>
T atomic_add(Shared<T> to, T value, GLM5_SIM_SITE) {
  to.touch(Access::atomic, sizeof(T), sizeof(T), at);
  const T old = *to.raw();
  *to.raw() = old + value;
  return old;
}
// On global memory other blocks run beside this one.
template <class T>
T atomic_add(T* to, T value) {
  static_assert(std::is_integral_v<T>, "floating-point atomics have no order: sum in a fixed one");
  return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}

}  // namespace glm5::sim
