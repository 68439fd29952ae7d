// Launching a kernel on the simulator: blocks spread over the thread pool, each on one thread.
#pragma once

#include <cstddef>
#include <tuple>

#include "sim/cuda/block.h"

namespace glm5::sim {

constexpr size_t kPortableShared = 99 * 1024;  // what every card from sm_80 on lends a block
constexpr size_t kHopperShared = 227 * 1024;

struct LaunchCounts {
  uint64_t launches = 0, blocks = 0;
};

// Runs `invoke(closure)` for every thread of the grid. Throws KernelFault for the first block, by number, that broke a
// rule, ContractError when the machine would not launch this at all.
void run_grid(const char* kernel, Index3 grid, unsigned threads, size_t shared_bytes, size_t most_shared,
              void (*invoke)(void*), void* closure);
LaunchCounts launch_counts();
// Whether launchers look for bad indices, lengths and pages first; off, kernels meet them.
bool values_are_checked();
void check_values(bool on);

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), Index3 grid, unsigned threads, size_t shared_bytes,
            size_t most_shared, Arguments... arguments) {
  struct Closure {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
  } closure{kernel, std::tuple<Parameters...>(arguments...)};
  run_grid(
      name, grid, threads, shared_bytes, most_shared,
      [](void* state) {
        auto* c = static_cast<Closure*>(state);
        std::apply(c->kernel, c->arguments);
      },
      &closure);
}

}  // namespace glm5::sim
