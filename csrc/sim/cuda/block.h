// One thread block in execution: its threads as fibres, who is ready, who waits for whom, and its shared memory.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <vector>

#include "sim/cuda/fibre.h"
#include "sim/cuda/race.h"
#include "sim/cuda/settings.h"
#include "sim/cuda/site.h"

namespace glm5::sim {

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};

constexpr unsigned kWarp = 32, kMostThreads = 1024, kBarriers = 16, kWarpgroup = 128;

enum class State : uint8_t { ready, waiting, done };

// A copy from global to shared memory on its way: `valid` bytes from `from`, zeros after them.
struct Copy {
  unsigned char* to;
  const unsigned char* from;
  unsigned bytes, valid;
  bool landed;
  Site at;
};

struct Thread {
  Fibre fibre;
  State state = State::ready;
  unsigned linear = 0, lane = 0, warp = 0;
  const char* what = nullptr;  // it waits for, or did last
  Site at{};
  std::vector<Copy> open;  // copies of no group yet
  std::vector<std::vector<Copy>> groups;
};

// Lanes of a warp that meet at one instruction.
struct Rendezvous {
  uint32_t mask = 0, arrived = 0;
  const char* what = nullptr;
  Site at{};
  void* argument[kWarp];
};

struct Barrier {
  const char* what = nullptr;
  Site at{};
  unsigned wanted = 0;
  std::vector<unsigned> waiting;
};

struct AsyncUnits;  // Hopper's: mbarriers, the copy engine, warpgroups (hopper.h)

class Block {
 public:
  Block();
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // Runs invoke(closure) on every thread of one block. False when it broke a rule: see fault().
  bool run(const Settings& settings, const char* kernel, Index3 grid, Index3 index, unsigned threads,
           size_t shared_bytes, void (*invoke)(void*), void* closure);
  const char* fault() const { return fault_; }

  // The block that runs on this thread of the system; null outside of kernels.
  static Block* current();

  Thread& thread() { return *running_; }
  Index3 index() const { return index_; }
  Index3 grid() const { return grid_; }
  unsigned threads() const { return threads_; }
  const Settings& settings() const { return settings_; }
  uint64_t random();

  unsigned char* shared() { return shared_; }
  size_t shared_bytes() const { return shared_bytes_; }
  RaceDetector& races() { return races_; }
  AsyncUnits& units() { return *units_; }

  // Checks an access to shared memory and records it. `begin`, `end`: the array it must lie in.
  void touch(Access access, const void* p, size_t bytes, const void* begin, const void* end, size_t alignment, Site at);
  void land(const Copy& copy, Site at);

  // Lanes of `mask` meet at `what`; the last to come runs compute(arguments by lane, mask) for all. `orders`: whether
  // memory accesses before are ordered before those after.
  template <class F>
  void collective(uint32_t mask, const char* what, void* argument, bool orders, Site at, const F& compute) {
    if (!arrive(mask, what, argument, at)) return;
    Rendezvous& meeting = *meeting_;
    compute(meeting.argument, mask);
    depart(meeting, orders);
  }
  // All threads, or `count` of them at barrier `id`, meet.
  void barrier(unsigned id, unsigned count, const char* what, Site at);

  // Lets others run; this thread stays ready.
  void yield();
  // Waits until another thread makes this one ready.
  void wait(const char* what, Site at);
  void make_ready(unsigned thread);
  bool has_ready() const { return ready_.size() != ready_head_; }
  // Where the bytes that are moved now were asked for, should their address be bad; an empty site afterwards.
  void moving(Site at) { moving_ = at; }

  // Ends the block with `kernel, block, thread: sentence at file:line`.
  [[noreturn]] void fail_at(Site at, const char* format, ...) __attribute__((format(printf, 3, 4)));
  // From the signal handler: an access to `address` at instruction `pc` has failed.
  void fail_in_signal(const void* address, const void* pc, bool wrote);

  static void describe(char* to, size_t size, Site at);

 private:
  friend void block_fibre();

  bool arrive(uint32_t mask, const char* what, void* argument, Site at);
  void depart(Rendezvous& meeting, bool orders);
  Thread* next();
  void go(Thread& to, bool last);
  void go_home();
  void finish_thread();
  void describe_deadlock();
  void start_of_fault();

  Settings settings_;
  const char* kernel_ = "";
  Index3 grid_, index_;
  unsigned threads_ = 0, live_ = 0;
  void (*invoke_)(void*) = nullptr;
  void* closure_ = nullptr;

  Stacks stacks_;
  std::vector<Thread> all_;
  Thread home_;  // the caller of run
  Thread* running_ = nullptr;
  std::vector<unsigned> ready_;
  size_t ready_head_ = 0;
  uint64_t random_ = 1;

  std::vector<std::vector<Rendezvous>> meetings_;  // of each warp
  Rendezvous* meeting_ = nullptr;
  Barrier barriers_[kBarriers];
  AsyncUnits* units_;

  unsigned char* arena_ = nullptr;  // shared memory between guard pages
  size_t arena_bytes_ = 0;
  unsigned char* shared_ = nullptr;
  size_t shared_bytes_ = 0;
  RaceDetector races_;

  char fault_[2048] = {};
  size_t fault_used_ = 0;
  sigjmp_buf signal_return_;
  const void* signal_address_ = nullptr;
  const void* signal_pc_ = nullptr;
  bool signal_wrote_ = false;
  Site moving_{};
};

}  // namespace glm5::sim
