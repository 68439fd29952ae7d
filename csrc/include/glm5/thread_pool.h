// Splits independent work over sleeping worker threads. Results must never depend on how it was split.
#pragma once

#include <cstdint>
#include <type_traits>

#include "glm5/check.h"

namespace glm5 {

// How many threads a parallel_for may use, the caller included: what was set, else the least of the affinity mask, the
// cgroup's CPU quota, OMP_NUM_THREADS and what the host program says now (see follow_num_threads).
int get_num_threads();
// Throws ContractError unless n >= 1.
void set_num_threads(int n);
// Until a number is set, `host` is asked at each call how many threads the host program uses; null asks nobody.
void follow_num_threads(int (*host)());

// Calls fn(state, begin, end) over disjoint ranges that cover [0, n), each of at least `grain` items but the last.
// Runs inline when nested, when one range suffices, or while another thread holds the pool. Rethrows the first
// exception once every range has stopped.
void parallel_ranges(int64_t n, int64_t grain, void (*fn)(void* state, int64_t begin, int64_t end), void* state);

// parallel_ranges for a callable f(begin, end).
template <class F>
GLM5_INLINE void parallel_for(int64_t n, int64_t grain, F&& f) {
  auto call = [](void* state, int64_t begin, int64_t end) {
    (*static_cast<std::remove_reference_t<F>*>(state))(begin, end);
  };
  parallel_ranges(n, grain, call, const_cast<void*>(static_cast<const void*>(&f)));
}

// Round to nearest, denormals kept, no traps, whatever the host program has set; restores the host's state.
class FloatEnvironment {
 public:
  FloatEnvironment();
  ~FloatEnvironment();
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  uint64_t saved_;
};

}  // namespace glm5
