#include "sim/cuda/block.h"

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <new>

#include "sim/cuda/fault.h"
#include "sim/cuda/hopper.h"

namespace glm5::sim {
namespace {

constexpr size_t kPage = 4096;
constexpr unsigned char kPoison = 0xff;  // NaN as a float, -1 as an integer

thread_local Block* running_block = nullptr;

const char* plural(unsigned n) {
  return n == 1 ? "" : "s";
}

}  // namespace

Block* Block::current() {
  return running_block;
}

Block::Block() : units_(new AsyncUnits) {}
Block::~Block() {
  delete units_;
  if (arena_ != nullptr) munmap(arena_, arena_bytes_);
}

// ---- running ----

// Reads what to run through a call, since a fibre may keep no address of thread-local data over a switch.
void block_fibre() {
  fibre_begins();
  Block* block = running_block;
  block->invoke_(block->closure_);
  block->finish_thread();
}

bool Block::run(const Settings& settings, const char* kernel, Index3 grid, Index3 index, unsigned threads,
                size_t shared_bytes, void (*invoke)(void*), void* closure) {
  settings_ = settings;
  kernel_ = kernel;
  grid_ = grid;
  index_ = index;
  threads_ = live_ = threads;
  invoke_ = invoke;
  closure_ = closure;
  fault_[0] = '\0';
  fault_used_ = 0;
  moving_ = Site{};
  random_ = (settings.seed * 0x9e3779b97f4a7c15ull + index.x * 0x100000001b3ull + index.y * 0x1000193ull + index.z) | 1;

  const size_t span = (shared_bytes + kPage - 1) / kPage * kPage;
  if (arena_ == nullptr || arena_bytes_ != span + 2 * kPage) {
    if (arena_ != nullptr) munmap(arena_, arena_bytes_);
    arena_bytes_ = span + 2 * kPage;
    void* mapped = mmap(nullptr, arena_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    arena_ = static_cast<unsigned char*>(mapped);
    if (span != 0) mprotect(arena_ + kPage, span, PROT_READ | PROT_WRITE);
  }
  shared_ = arena_ + kPage;
  shared_bytes_ = shared_bytes;
  std::memset(shared_, kPoison, span);
  races_.reset(threads, shared_bytes);

  stacks_.reserve(threads);
  if (all_.size() < threads) all_.resize(threads);
  const unsigned warps = (threads + kWarp - 1) / kWarp;
  meetings_.resize(warps);
  for (auto& warp : meetings_) warp.assign(4, Rendezvous{});
  for (Barrier& b : barriers_) b = Barrier{};
  units_->reset(warps);
  ready_.clear();
  ready_head_ = 0;
  for (unsigned i = 0; i < threads; ++i) {
    Thread& t = all_[i];
    t.state = State::ready;
    t.linear = i;
    t.lane = i % kWarp;
    t.warp = i / kWarp;
    t.what = nullptr;
    t.open.clear();
    t.groups.clear();
    t.fibre.stack = stacks_.stack(i);
    t.fibre.bytes = stacks_.bytes();
    prepare_fibre(t.fibre, block_fibre, i);
    ready_.push_back(i);
  }
  running_block = this;
  running_ = &home_;
  home_.state = State::ready;
  const SignalGuard guard;
  if (sigsetjmp(signal_return_, 0) == 0) {
    if (Thread* first = next()) go(*first, false);
  } else {
    start_of_fault();
    describe_bad_access(fault_ + fault_used_, sizeof fault_ - fault_used_, signal_address_, signal_pc_, signal_wrote_,
                        stacks_.guard_of(signal_address_) >= 0, moving_);
    running_ = &home_;
  }
  if (fault_[0] == '\0' && live_ == 0) units_->check_idle(fault_, sizeof fault_, kernel_);
  if (fault_[0] == '\0' && live_ != 0) describe_deadlock();
  units_->drop();
  running_block = nullptr;
  return fault_[0] == '\0';
}

uint64_t Block::random() {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return random_ >> 11;
}

Thread* Block::next() {
  units_->advance(*this, ready_.size() == ready_head_);
  const size_t n = ready_.size() - ready_head_;
  if (n == 0) return nullptr;
  unsigned chosen;
  if (settings_.order == Order::fifo) {
    chosen = ready_[ready_head_++];
    if (ready_head_ > 4096) {
      ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(ready_head_));
      ready_head_ = 0;
    }
  } else {
    const size_t at = ready_head_ + (settings_.order == Order::lifo ? n - 1 : random() % n);
    chosen = ready_[at];
    ready_[at] = ready_.back();
    ready_.pop_back();
  }
  return &all_[chosen];
}

void Block::go(Thread& to, bool last) {
  Thread& from = *running_;
  if (&from == &to) return;
  running_ = &to;
  switch_fibre(from.fibre, to.fibre, last);
}
void Block::go_home() {
  go(home_, true);
  __builtin_unreachable();
}

void Block::yield() {
  make_ready(running_->linear);
  go(*next(), false);
}
void Block::wait(const char* what, Site at) {
  running_->state = State::waiting;
  running_->what = what;
  running_->at = at;
  Thread* to = next();
  go(to == nullptr ? home_ : *to, false);
}
void Block::make_ready(unsigned thread) {
  all_[thread].state = State::ready;
  ready_.push_back(thread);
}

void Block::finish_thread() {
  Thread& t = *running_;
  t.groups.push_back(t.open);
  for (const auto& group : t.groups) {
    if (!group.empty()) fail_at(group.front().at, "cp.async: the thread ends before it has waited for its copy");
  }
  for (const Rendezvous& r : meetings_[t.warp]) {
    if (r.arrived != 0 && (r.mask >> t.lane & 1)) {
      fail_at(r.at, "lane %u of warp %u ends, but its warp waits for it at %s", t.lane, t.warp, r.what);
    }
  }
  for (const Barrier& b : barriers_) {
    if (&b == &barriers_[0] && !b.waiting.empty()) {
      fail_at(b.at, "thread %u ends, but others wait for all threads at %s", t.linear, b.what);
    }
  }
  --live_;
  t.state = State::done;
  Thread* to = next();
  go(to == nullptr ? home_ : *to, true);
  __builtin_unreachable();
}

// ---- meeting ----

void Block::barrier(unsigned id, unsigned count, const char* what, Site at) {
  if (id >= kBarriers) fail_at(at, "%s: barrier is %u, needs 0 to %u", what, id, kBarriers - 1);
  if (count % kWarp != 0) fail_at(at, "%s: %u threads, needs whole warps", what, count);
  Barrier& b = barriers_[id];
  if (count == 0 && live_ != threads_) {
    fail_at(at, "%s: %u thread%s have ended, needs all threads of the block", what, threads_ - live_,
            plural(threads_ - live_));
  }
  if (b.waiting.empty()) {
    b.what = what;
    b.at = at;
    b.wanted = count == 0 ? threads_ : count;
  } else if (b.at.line != at.line || b.at.file != at.file) {
    char other[256];
    describe(other, sizeof other, b.at);
    fail_at(at, "divergent barrier: %s while others wait at %s, %s", what, b.what, other);
  }
  b.waiting.push_back(running_->linear);
  if (b.waiting.size() < b.wanted) return wait(what, at);
  if (b.wanted == threads_) {
    races_.join_all();
  } else {
    races_.join(b.waiting.data(), static_cast<unsigned>(b.waiting.size()));
  }
  b.waiting.pop_back();
  for (unsigned t : b.waiting) make_ready(t);
  b.waiting.clear();
  yield();
}

// Whether the caller is the last to come; it must compute and depart.
bool Block::arrive(uint32_t mask, const char* what, void* argument, Site at) {
  Thread& t = *running_;
  if (!(mask >> t.lane & 1)) fail_at(at, "partial warp: %s: lane %u is not in its own mask 0x%08x", what, t.lane, mask);
  Rendezvous *mine = nullptr, *free = nullptr;
  for (Rendezvous& r : meetings_[t.warp]) {
    if (r.arrived == 0) {
      free = free == nullptr ? &r : free;
    } else if (r.mask == mask) {
      mine = &r;
    } else if (r.mask & mask) {
      char other[256];
      describe(other, sizeof other, r.at);
      fail_at(at, "partial warp: %s with mask 0x%08x while lanes 0x%08x wait at %s with mask 0x%08x, %s", what, mask,
              r.arrived, r.what, r.mask, other);
    }
  }
  if (mine == nullptr) {
    if (free == nullptr) fail_at(at, "%s: five groups of one warp are apart, needs at most four", what);
    mine = free;
    mine->mask = mask;
    mine->what = what;
    mine->at = at;
  } else if (mine->at.line != at.line || mine->at.file != at.file || mine->what != what) {
    char other[256];
    describe(other, sizeof other, mine->at);
    fail_at(at, "divergent warp: %s while lanes 0x%08x wait at %s, %s", what, mine->arrived, mine->what, other);
  }
  mine->argument[t.lane] = argument;
  mine->arrived |= 1u << t.lane;
  if (mine->arrived != mask) {
    wait(what, at);
    return false;
  }
  meeting_ = mine;
  return true;
}

void Block::depart(Rendezvous& meeting, bool orders) {
  const unsigned base = running_->warp * kWarp;
  if (orders) {
    unsigned lanes[kWarp], count = 0;
    for (uint32_t m = meeting.mask; m != 0; m &= m - 1) lanes[count++] = base + __builtin_ctz(m);
    races_.join(lanes, count);
  }
  const uint32_t others = meeting.mask & ~(1u << running_->lane);
  meeting.arrived = 0;
  for (uint32_t m = others; m != 0; m &= m - 1) make_ready(base + __builtin_ctz(m));
  if (settings_.order != Order::fifo && others != 0) yield();
}

// ---- shared memory ----

void Block::touch(Access access, const void* p, size_t bytes, const void* begin, const void* end, size_t alignment,
                  Site at) {
  const auto address = reinterpret_cast<uintptr_t>(p), from = reinterpret_cast<uintptr_t>(begin),
             to = reinterpret_cast<uintptr_t>(end);
  if (address < from || address + bytes > to) {
    fail_at(at, "shared memory: %zu bytes at byte %lld of an array of %lld bytes", bytes,
            static_cast<long long>(address - from), static_cast<long long>(to - from));
  }
  if (address % alignment != 0) {
    fail_at(at, "shared memory: an access of %zu bytes at byte %lld of its array is unaligned, needs %zu bytes", bytes,
            static_cast<long long>(address - from), alignment);
  }
  const size_t offset = address - reinterpret_cast<uintptr_t>(shared_);
  if (races_.exhausted(running_->linear)) fail_at(at, "a thread has met others a million times, needs fewer");
  const Conflict c = races_.touch(access, running_->linear, offset, bytes, at);
  if (c.kind == Conflict::none) return;
  if (c.kind == Conflict::unwritten) {
    fail_at(at, "shared memory: read at byte %lld of its array, which nothing has written so far",
            static_cast<long long>(address - from));
  }
  char other[256];
  describe(other, sizeof other, c.at);
  const char* verb = access == Access::read ? "read" : "written";
  if (c.kind == Conflict::pending) {
    fail_at(at, "shared memory: %s while an asynchronous copy of thread %u is on its way, which was issued at %s", verb,
            c.thread, other);
  }
  fail_at(at, "data race: shared memory is %s with no barrier since thread %u has %s it at %s", verb, c.thread,
          c.earlier_wrote ? "written" : "read", other);
}

void Block::land(const Copy& copy, Site at) {
  races_.land(running_->linear, static_cast<size_t>(copy.to - shared_), copy.bytes, at);
}

// ---- faults ----

void Block::describe(char* to, size_t size, Site at) {
  std::snprintf(to, size, "%s:%d", at.file == nullptr ? "?" : at.file, at.line);
}

void Block::start_of_fault() {
  fault_used_ = static_cast<size_t>(std::snprintf(fault_, sizeof fault_, "%s: block (%u, %u, %u), thread %u: ", kernel_,
                                                  index_.x, index_.y, index_.z, running_->linear));
}

void Block::fail_at(Site at, const char* format, ...) {
  start_of_fault();
  va_list arguments;
  va_start(arguments, format);
  fault_used_ += static_cast<size_t>(std::vsnprintf(fault_ + fault_used_, 1024, format, arguments));
  va_end(arguments);
  char place[256];
  describe(place, sizeof place, at);
  std::snprintf(fault_ + fault_used_, sizeof fault_ - fault_used_, ", at %s", place);
  go_home();
  __builtin_unreachable();
}

void Block::fail_in_signal(const void* address, const void* pc, bool wrote) {
  signal_address_ = address;
  signal_pc_ = pc;
  signal_wrote_ = wrote;
  siglongjmp(signal_return_, 1);
}

void Block::describe_deadlock() {
  running_ = &home_;
  size_t used = static_cast<size_t>(
      std::snprintf(fault_, sizeof fault_, "%s: block (%u, %u, %u): deadlock:", kernel_, index_.x, index_.y, index_.z));
  // Threads that wait at one place make one entry.
  std::vector<bool> told(threads_, false);
  for (unsigned i = 0, shown = 0; i < threads_ && shown < 6; ++i) {
    if (all_[i].state != State::waiting || told[i]) continue;
    unsigned count = 0;
    for (unsigned j = i; j < threads_; ++j) {
      if (all_[j].state == State::waiting && all_[j].at.line == all_[i].at.line && all_[j].what == all_[i].what) {
        told[j] = true;
        ++count;
      }
    }
    char place[256];
    describe(place, sizeof place, all_[i].at);
    used += static_cast<size_t>(std::snprintf(fault_ + used, sizeof fault_ - used,
                                              "%s %u thread%s from %u on wait at %s, at %s", shown++ ? ";" : "", count,
                                              plural(count), i, all_[i].what, place));
    if (used + 300 > sizeof fault_) return;
  }
  for (unsigned w = 0; w < meetings_.size(); ++w) {
    for (const Rendezvous& r : meetings_[w]) {
      if (r.arrived == 0 || used + 300 > sizeof fault_) continue;
      used += static_cast<size_t>(std::snprintf(fault_ + used, sizeof fault_ - used,
                                                "; partial warp: %s of warp %u misses lanes 0x%08x", r.what, w,
                                                r.mask & ~r.arrived));
    }
  }
}

}  // namespace glm5::sim
