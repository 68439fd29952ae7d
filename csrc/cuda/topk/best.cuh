// The K best of a stream of keys, in shared memory: a buffer takes what may still be among them and is thinned by a
// radix selection when it is full. Nothing of the size [T, keys] exists anywhere.
//
// An entry is the order of a score above the complement of its position: larger is better, entries are all different,
// so the selection is one, in whatever parts the keys come.
#pragma once

#include "cuda/dev/smem.h"
#include "cuda/dev/sync.h"

namespace glm5::cuda {

constexpr int kTopkThreads = 128, kMostTopk = 2048, kSlack = 1024, kDigits = 256;

// Orders of scores as unsigned integers: NaN is -inf, -0 is +0. No score has the order 0.
GLM5_DEVICE dev::u32 order_of(float score) {
  const dev::u32 bits = dev::bits_of((score == score ? score : -dev::infinity()) + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
GLM5_DEVICE float score_of(dev::u32 order) {
  return dev::float_of(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}
GLM5_DEVICE dev::u64 entry_of(float score, int position) {
  return static_cast<dev::u64>(order_of(score)) << 32 | static_cast<dev::u32>(~position);
}
GLM5_DEVICE int position_of(dev::u64 entry) {
  return static_cast<int>(~static_cast<dev::u32>(entry));
}

struct Best {
  dev::Shared<dev::u64> entries;  // in the order they came
  dev::Shared<int> histogram, counts, found;
  int topk, capacity;
  // The same in all threads.
  int count = 0;
  dev::u64 limit = 0;  // entries below are not among the best

  GLM5_DEVICE Best(dev::SharedMemory& memory, int k) : topk(k), capacity(k + kSlack) {
    entries = memory.array<dev::u64>(capacity);
    histogram = memory.array<int>(kDigits);
    counts = memory.array<int>(kTopkThreads / 32);
    found = memory.array<int>(4);
  }
  GLM5_BOTH static constexpr dev::SharedBytes bytes(dev::SharedBytes before, int k) {
    return before.array<dev::u64>(k + kSlack).array<int>(kDigits).array<int>(kTopkThreads / 32).array<int>(4);
  }

  // How many of the threads before this one have `mine`; `total`: of all threads. All threads must call it.
  GLM5_DEVICE int rank(bool mine, int& total) {
    const int lane = dev::lane_index(), warp = dev::warp_index();
    const dev::u32 votes = dev::ballot(mine);
    if (lane == 0) counts[warp] = dev::population(votes);
    dev::sync_threads();
    int before = 0, all = 0;
    for (int w = 0; w < kTopkThreads / 32; ++w) {
      const int n = counts[w];
      before += w < warp ? n : 0;
      all += n;
    }
    dev::sync_threads();
    total = all;
    return before + dev::population(votes & ((1u << lane) - 1u));
  }

  // Offers an entry of each thread; 0 is none. Entries come in ascending positions. All threads must call it.
  GLM5_DEVICE void offer(dev::u64 entry) {
    if (count > capacity - kTopkThreads) thin();
    const bool mine = entry != 0 && entry >= limit;
    int total = 0;
    const int at = count + rank(mine, total);
    if (mine) entries[at] = entry;
    count += total;
  }

  // Keeps the K best, in their order. All threads must call it.
  GLM5_DEVICE void thin() {
    dev::sync_threads();
    if (count <= topk) return;
    int shift = 56, remaining = topk;
    dev::u64 prefix = 0;
    for (;; shift -= 8) {
      for (int i = dev::thread_index(); i < kDigits; i += kTopkThreads) histogram[i] = 0;
      dev::sync_threads();
      for (int i = dev::thread_index(); i < count; i += kTopkThreads) {
        const dev::u64 entry = entries[i];
        if (shift == 56 || entry >> (shift + 8) == prefix) {
          dev::atomic_add(histogram + static_cast<int>(entry >> shift & 255u), 1);
        }
      }
      dev::sync_threads();
      if (dev::warp_index() == 0) find_digit(remaining);
      dev::sync_threads();
      prefix = prefix << 8 | static_cast<dev::u32>(found[0]);
      remaining = found[1];
      if (found[2] == remaining || shift == 0) break;
    }
    limit = prefix << shift;
    int kept = 0;
    for (int first = 0; first < count; first += kTopkThreads) {
      const int i = first + dev::thread_index();
      const dev::u64 entry = i < count ? static_cast<dev::u64>(entries[i]) : 0;
      int total = 0;
      const bool mine = entry != 0 && entry >= limit;
      const int at = kept + rank(mine, total);  // its barriers let everybody read before anybody writes
      if (mine) entries[at] = entry;
      kept += total;
    }
    count = kept;
    dev::sync_threads();
  }

  // The digit of the `remaining`-th largest entry, how many are wanted of that digit, and how many there are.
  GLM5_DEVICE void find_digit(int remaining) {
    const int lane = dev::lane_index(), top = kDigits - 1 - 8 * lane;
    int sum = 0;
    for (int i = 0; i < 8; ++i) sum += histogram[top - i];
    int upto = sum;
    for (int d = 1; d < 32; d *= 2) {
      const int other = dev::shuffle_up(upto, d);
      if (lane >= d) upto += other;
    }
    const int before = upto - sum;
    if (before >= remaining || remaining > upto) return;
    int digit = top, wanted = remaining - before, here = histogram[digit];
    while (here < wanted) {
      wanted -= here;
      here = histogram[--digit];
    }
    found[0] = digit;
    found[1] = wanted;
    found[2] = here;
  }
};

}  // namespace glm5::cuda
