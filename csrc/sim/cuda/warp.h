// What a warp does together, besides matrices.
#pragma once

#include <cstring>

#include "sim/cuda/block.h"

namespace glm5::sim {

inline void sync_threads(GLM5_SIM_SITE) {
  Block::current()->barrier(0, 0, "sync_threads", at);
}
inline void named_barrier(unsigned id, unsigned threads, GLM5_SIM_SITE) {
  Block::current()->barrier(id, threads, "named_barrier", at);
}
inline void sync_warp(uint32_t mask = ~0u, GLM5_SIM_SITE) {
  Block::current()->collective(mask, "sync_warp", nullptr, true, at, [](void**, uint32_t) {});
}

namespace detail {
struct Shuffle {
  uint32_t value, result;
  int source;
};
// Values of up to four bytes move; a lane that reads one outside the mask gets garbage, as on the machine.
template <class T>
T shuffle(uint32_t mask, T value, int source, const char* what, Site at) {
  static_assert(sizeof(T) == 4, "shuffles move 32 bits");
  Shuffle mine{0, 0, source};
  std::memcpy(&mine.value, &value, sizeof value);
  Block::current()->collective(mask, what, &mine, false, at, [](void** lanes, uint32_t m) {
    for (uint32_t rest = m; rest != 0; rest &= rest - 1) {
      auto* lane = static_cast<Shuffle*>(lanes[__builtin_ctz(rest)]);
      const bool there = (m >> (lane->source & 31) & 1) != 0;
      lane->result = there ? static_cast<Shuffle*>(lanes[lane->source & 31])->value : 0xffffffffu;
    }
  });
  T result;
  std::memcpy(&result, &mine.result, sizeof result);
  return result;
}
struct Vote {
  bool predicate;
  uint32_t result;
};
}  // namespace detail

template <class T>
T shuffle(T value, int source, uint32_t mask = ~0u, GLM5_SIM_SITE) {
  return detail::shuffle(mask, value, source, "shuffle", at);
}
template <class T>
T shuffle_xor(T value, int distance, uint32_t mask = ~0u, GLM5_SIM_SITE) {
  return detail::shuffle(mask, value, static_cast<int>(Block::current()->thread().lane) ^ distance, "shuffle_xor", at);
}
// Lanes below `distance` keep their own value.
template <class T>
T shuffle_up(T value, int distance, uint32_t mask = ~0u, GLM5_SIM_SITE) {
  const int lane = static_cast<int>(Block::current()->thread().lane);
  return detail::shuffle(mask, value, lane < distance ? lane : lane - distance, "shuffle_up", at);
}
inline uint32_t ballot(bool predicate, uint32_t mask = ~0u, GLM5_SIM_SITE) {
  detail::Vote mine{predicate, 0};
  Block::current()->collective(mask, "ballot", &mine, false, at, [](void** lanes, uint32_t m) {
    uint32_t votes = 0;
    for (uint32_t rest = m; rest != 0; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest);
      if (static_cast<detail::Vote*>(lanes[lane])->predicate) votes |= 1u << lane;
    }
    for (uint32_t rest = m; rest != 0; rest &= rest - 1) {
      static_cast<detail::Vote*>(lanes[__builtin_ctz(rest)])->result = votes;
    }
  });
  return mine.result;
}

}  // namespace glm5::sim
