#include "sim/cuda/launch.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "glm5/check.h"
#include "glm5/thread_pool.h"

namespace glm5::sim {
namespace {

std::atomic<uint64_t> launches{0}, blocks{0};
std::atomic<bool> checked{true};

// Kept by each thread of the system: stacks are costly to map.
Block& block_of_this_thread() {
  static thread_local std::unique_ptr<Block> block;
  if (block == nullptr) block.reset(new Block);
  return *block;
}

}  // namespace

LaunchCounts launch_counts() {
  return {launches, blocks};
}

bool values_are_checked() {
  return checked;
}
void check_values(bool on) {
  checked = on;
}

void run_grid(const char* kernel, Index3 grid, unsigned threads, size_t shared_bytes, size_t most_shared,
              void (*invoke)(void*), void* closure) {
  if (Block::current() != nullptr) fail("%s: launched from inside a kernel, needs a launch from the host", kernel);
  if (threads == 0 || threads > kMostThreads || threads % kWarp != 0) {
    fail("%s: a block has %u threads, needs whole warps, 32 to %u", kernel, threads, kMostThreads);
  }
  if (shared_bytes > most_shared) {
    fail("%s: a block takes %zu bytes of shared memory, needs at most %zu", kernel, shared_bytes, most_shared);
  }
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    fail("%s: the grid is (%u, %u, %u), needs at most (2147483647, 65535, 65535)", kernel, grid.x, grid.y, grid.z);
  }
  const int64_t total = static_cast<int64_t>(grid.x) * grid.y * grid.z;
  const Settings settings = current_settings();
  ++launches;
  std::mutex mutex;
  std::string fault;
  std::atomic<int64_t> first_fault{total};
  parallel_for(total, 1, [&](int64_t begin, int64_t end) {
    Block& block = block_of_this_thread();
    for (int64_t n = begin; n < end; ++n) {
      const int64_t i = settings.order == Order::fifo ? n : total - 1 - n;
      if (i >= first_fault) continue;
      const Index3 index{static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                         static_cast<unsigned>(i / grid.x / grid.y)};
      ++blocks;
      if (block.run(settings, kernel, grid, index, threads, shared_bytes, invoke, closure)) continue;
      const std::lock_guard<std::mutex> lock(mutex);
      if (i < first_fault) {
        first_fault = i;
        fault = block.fault();
      }
    }
  });
  if (first_fault < total) {
    throw KernelFault(fault + "; replay with " + kReplayVariable + "=" + to_string(settings));
  }
}

}  // namespace glm5::sim
