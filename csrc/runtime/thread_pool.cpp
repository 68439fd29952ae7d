#include "glm5/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace glm5 {
namespace {

uint64_t read_float_state() {
#if defined(__x86_64__)
  return _mm_getcsr();
#elif defined(__aarch64__)
  uint64_t value;
  __asm__ volatile("mrs %0, fpcr" : "=r"(value));
  return value;
#else
  return 0;
#endif
}

void write_float_state([[maybe_unused]] uint64_t value) {
#if defined(__x86_64__)
  _mm_setcsr(static_cast<unsigned>(value));
#elif defined(__aarch64__)
  __asm__ volatile("msr fpcr, %0" ::"r"(value));
#endif
}

// All exceptions masked, round to nearest, FTZ and DAZ (FZ on Arm) off.
#if defined(__x86_64__)
constexpr uint64_t kFloatState = 0x1f80;
#else
constexpr uint64_t kFloatState = 0;
#endif

int affinity_limit() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

// Whole CPUs granted by one quota/period pair, 0 when unlimited.
int quota_cpus(double quota, double period) {
  return quota > 0 && period > 0 ? std::max(1, static_cast<int>((quota + period - 1) / period)) : 0;
}

int tighter(int limit, int found) {
  return found > 0 ? std::min(limit, found) : limit;
}

double read_number(const std::string& path) {
  double value = -1;
  if (std::FILE* file = std::fopen(path.c_str(), "r")) {
    if (std::fscanf(file, "%lf", &value) != 1) value = -1;
    std::fclose(file);
  }
  return value;
}

// Version 2 writes "quota period" (or "max period") in every group from ours up to the root.
int cgroup_v2_limit(std::string group) {
  int limit = 1 << 20;
  for (;;) {
    if (std::FILE* file = std::fopen(("/sys/fs/cgroup" + group + "/cpu.max").c_str(), "r")) {
      double quota, period;
      if (std::fscanf(file, "%lf %lf", &quota, &period) == 2) limit = tighter(limit, quota_cpus(quota, period));
      std::fclose(file);
    }
    if (group.empty()) return limit;
    group.resize(group.find_last_of('/'));
  }
}

int cgroup_limit() {
  int limit = 1 << 20;
  std::string group;
  if (std::FILE* file = std::fopen("/proc/self/cgroup", "r")) {
    char line[4096];
    while (std::fgets(line, sizeof line, file)) {
      line[std::strcspn(line, "\n")] = 0;
      if (std::strncmp(line, "0::/", 4) == 0) group = line + 3;
    }
    std::fclose(file);
  }
  if (group == "/") group.clear();
  limit = cgroup_v2_limit(group);
  for (const char* root : {"/sys/fs/cgroup/cpu/", "/sys/fs/cgroup/cpu,cpuacct/"}) {
    const std::string base = root;
    limit = tighter(limit, quota_cpus(read_number(base + "cpu.cfs_quota_us"), read_number(base + "cpu.cfs_period_us")));
  }
  return limit;
}

int environment_limit() {
  const char* text = std::getenv("OMP_NUM_THREADS");
  const int value = text ? std::atoi(text) : 0;  // a list "4,2" means 4 at the outer level
  return value > 0 ? value : 1 << 20;
}

std::atomic<int> threads_set{0};  // 0: nobody has
std::atomic<int (*)()> threads_of_host{nullptr};

int thread_limit() {
  static const int limit = std::min({affinity_limit(), cgroup_limit(), environment_limit()});
  return limit;
}

// A decode step is hundreds of jobs some microseconds apart: a thread that has just worked looks for the next one this
// many times before it sleeps (how long a look takes is the processor's: microseconds to tens of them in all). An idle
// pool costs nothing.
constexpr int kLooks = 400;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

thread_local bool inside = false;

struct Job {
  void (*fn)(void*, int64_t, int64_t);
  void* state;
  int64_t n;
  int64_t chunk;
  int helpers_wanted;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error{};

  void work() {
    for (;;) {
      const int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= n || failed.load(std::memory_order_relaxed)) return;
      try {
        fn(state, begin, std::min(n, begin + chunk));
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
  }
};

class Pool {
 public:
  // False when another thread holds the pool: the caller then does the job itself.
  bool run(Job& job) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (!owner.owns_lock()) return false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (workers_ < job.helpers_wanted) {
        if (!start_worker()) break;
      }
      job_ = &job;
      posted_.fetch_add(1, std::memory_order_release);
    }
    if (sleeping_.load() > 0) wake_.notify_all();
    job.work();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = nullptr;  // a worker that has not woken yet has nothing left to do: nobody waits for it
    }
    for (int look = 0; look < kLooks && busy_.load(std::memory_order_acquire) > 0; ++look) pause();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return busy_ == 0; });
    return true;
  }

 private:
  bool start_worker() {
    // Signals belong to the host program's threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = true;
    try {
      std::thread([this] { serve(); }).detach();
      ++workers_;
    } catch (const std::exception&) {
      started = false;  // the limit of threads is reached: fewer helpers give the same results
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
  }

  void serve() {
    inside = true;
    write_float_state(kFloatState);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (!wanted()) {
        const uint64_t seen = posted_.load(std::memory_order_acquire);
        lock.unlock();
        for (int look = 0; look < kLooks && posted_.load(std::memory_order_acquire) == seen; ++look) pause();
        lock.lock();
        ++sleeping_;
        wake_.wait(lock, [&] { return wanted(); });
        --sleeping_;
      }
      Job* job = job_;
      --job->helpers_wanted;
      ++busy_;
      lock.unlock();
      job->work();
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  bool wanted() const { return job_ != nullptr && job_->helpers_wanted > 0; }

  std::mutex owner_;  // held by the thread whose job runs
  std::mutex mutex_;  // held by whoever changes what follows
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  int workers_ = 0;
  std::atomic<int> busy_{0}, sleeping_{0};
  std::atomic<uint64_t> posted_{0};  // jobs so far
};

// Never destroyed: workers may still sleep in it when the process ends.
std::atomic<Pool*> current_pool{nullptr};

Pool& pool() {
  static const bool once = [] {
    current_pool = new Pool;
    // Threads do not survive a fork and the locks may have been held: the child starts over with a fresh pool.
    pthread_atfork(nullptr, nullptr, [] { current_pool = new Pool; });
    return true;
  }();
  (void)once;
  return *current_pool;
}

}  // namespace

FloatEnvironment::FloatEnvironment() : saved_(read_float_state()) {
  if (saved_ != kFloatState) write_float_state(kFloatState);
}

FloatEnvironment::~FloatEnvironment() {
  write_float_state(saved_);
}

int get_num_threads() {
  if (const int set = threads_set.load(std::memory_order_relaxed)) return set;
  const auto host = threads_of_host.load(std::memory_order_relaxed);
  return host ? std::max(1, std::min(thread_limit(), host())) : thread_limit();
}

void set_num_threads(int n) {
  if (n < 1) fail("set_num_threads: n is %d, needs 1 or more", n);
  threads_set = n;
}

void follow_num_threads(int (*host)()) {
  threads_of_host = host;
}

void parallel_ranges(int64_t n, int64_t grain, void (*fn)(void*, int64_t, int64_t), void* state) {
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int threads = get_num_threads();
  // A few ranges per thread even out workers that wake late.
  const int64_t chunk = std::max(grain, (n + 4 * threads - 1) / (4 * threads));
  const int64_t ranges = (n + chunk - 1) / chunk;
  if (!inside && threads > 1 && ranges > 1) {
    Job job{fn, state, n, chunk, static_cast<int>(std::min<int64_t>(threads, ranges)) - 1};
    FloatEnvironment environment;
    inside = true;
    const bool ran = pool().run(job);
    inside = false;
    if (job.error) std::rethrow_exception(job.error);
    if (ran) return;
  }
  fn(state, 0, n);
}

}  // namespace glm5
