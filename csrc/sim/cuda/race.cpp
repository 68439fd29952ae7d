#include "sim/cuda/race.h"

#include <algorithm>
#include <cstring>

namespace glm5::sim {
namespace {

// A stamp: pending, atomic, thread (10 bits), clock (20 bits, from 1: a stamp of 0 is nobody's).
constexpr uint32_t kPending = 1u << 31, kAtomic = 1u << 30, kClockMask = (1u << 20) - 1;
constexpr unsigned kSiteSlots = 4096;

constexpr unsigned thread_of(uint32_t stamp) {
  return (stamp >> 20) & 1023u;
}
constexpr uint32_t clock_of(uint32_t stamp) {
  return stamp & kClockMask;
}

}  // namespace

void RaceDetector::reset(unsigned threads, size_t bytes) {
  threads_ = threads;
  records_.assign((bytes + kGranule - 1) / kGranule, Record{});
  seen_.assign(static_cast<size_t>(threads) * threads, 0);
  for (unsigned t = 0; t < threads; ++t) seen_[t * threads + t] = 1;
  if (sites_.empty()) {
    sites_.push_back(Site{});
    site_table_.assign(kSiteSlots, 0);
  }
}

uint16_t RaceDetector::intern(Site at) {
  unsigned slot = static_cast<unsigned>(reinterpret_cast<uintptr_t>(at.file) * 31u + static_cast<unsigned>(at.line));
  for (unsigned tries = 0; tries < kSiteSlots; ++tries, ++slot) {
    uint16_t& id = site_table_[slot % kSiteSlots];
    if (id == 0) {
      id = static_cast<uint16_t>(sites_.size());
      sites_.push_back(at);
      return id;
    }
    if (sites_[id].line == at.line && sites_[id].file == at.file) return id;
  }
  return 0;
}

bool RaceDetector::ordered(unsigned thread, uint32_t stamp) const {
  const unsigned other = thread_of(stamp);
  return stamp == 0 || other == thread || seen_[thread * threads_ + other] >= clock_of(stamp);
}

Conflict RaceDetector::conflict(Conflict::Kind kind, uint32_t stamp, uint16_t site, bool wrote) const {
  return Conflict{kind, wrote, thread_of(stamp), sites_[site]};
}

Conflict RaceDetector::touch(Access access, unsigned thread, size_t offset, size_t bytes, Site at) {
  const uint16_t site = intern(at);
  const uint32_t stamp = (thread << 20) | (seen_[thread * threads_ + thread] & kClockMask);
  const size_t end = (offset + bytes + kGranule - 1) / kGranule;
  for (size_t i = offset / kGranule; i < end; ++i) {
    Record& r = records_[i];
    if (r.write & kPending) return conflict(Conflict::pending, r.write, r.write_site, true);
    if (access == Access::read || access == Access::atomic) {
      if (r.write == 0) return Conflict{Conflict::unwritten, false, 0, Site{}};
    }
    if (!(access == Access::atomic && (r.write & kAtomic)) && !ordered(thread, r.write)) {
      return conflict(Conflict::race, r.write, r.write_site, true);
    }
    if (access == Access::read) {
      if (r.read[0] != 0 && thread_of(r.read[0]) != thread) {
        r.read[1] = r.read[0];
        r.read_site[1] = r.read_site[0];
      }
      r.read[0] = stamp;
      r.read_site[0] = site;
      continue;
    }
    for (int k = 0; k < 2; ++k) {
      if (!ordered(thread, r.read[k])) return conflict(Conflict::race, r.read[k], r.read_site[k], false);
    }
    const uint32_t kind = access == Access::copy ? kPending : access == Access::atomic ? kAtomic : 0u;
    r = Record{kind | stamp, {0, 0}, site, {0, 0}};
  }
  return Conflict{};
}

void RaceDetector::land(unsigned thread, size_t offset, size_t bytes, Site at) {
  const uint16_t site = intern(at);
  const uint32_t stamp = (thread << 20) | (seen_[thread * threads_ + thread] & kClockMask);
  const size_t end = (offset + bytes + kGranule - 1) / kGranule;
  for (size_t i = offset / kGranule; i < end; ++i) records_[i] = Record{stamp, {0, 0}, site, {0, 0}};
}

void RaceDetector::join(const unsigned* threads, unsigned count) {
  if (count == 0) return;
  uint32_t* first = &seen_[static_cast<size_t>(threads[0]) * threads_];
  for (unsigned k = 1; k < count; ++k) {
    const uint32_t* other = &seen_[static_cast<size_t>(threads[k]) * threads_];
    for (unsigned t = 0; t < threads_; ++t) first[t] = std::max(first[t], other[t]);
  }
  for (unsigned k = 1; k < count; ++k) {
    std::memcpy(&seen_[static_cast<size_t>(threads[k]) * threads_], first, threads_ * sizeof *first);
  }
  for (unsigned k = 0; k < count; ++k) ++seen_[static_cast<size_t>(threads[k]) * threads_ + threads[k]];
}

void RaceDetector::join_all() {
  // Nobody knows more of a thread than the thread itself.
  uint32_t* first = seen_.data();
  for (unsigned t = 1; t < threads_; ++t) first[t] = seen_[static_cast<size_t>(t) * threads_ + t];
  for (unsigned t = 1; t < threads_; ++t) {
    std::memcpy(&seen_[static_cast<size_t>(t) * threads_], first, threads_ * sizeof *first);
  }
  for (unsigned t = 0; t < threads_; ++t) ++seen_[static_cast<size_t>(t) * threads_ + t];
}

bool RaceDetector::exhausted(unsigned thread) const {
  return seen_[static_cast<size_t>(thread) * threads_ + thread] >= kClockMask - 1;
}

void RaceDetector::release(unsigned thread, std::vector<uint32_t>& clock) {
  clock.resize(threads_, 0);
  uint32_t* mine = &seen_[static_cast<size_t>(thread) * threads_];
  for (unsigned t = 0; t < threads_; ++t) clock[t] = std::max(clock[t], mine[t]);
  ++mine[thread];
}

void RaceDetector::acquire(unsigned thread, const std::vector<uint32_t>& clock) {
  uint32_t* mine = &seen_[static_cast<size_t>(thread) * threads_];
  for (unsigned t = 0; t < clock.size(); ++t) {
    if (t != thread) mine[t] = std::max(mine[t], clock[t]);
  }
}

}  // namespace glm5::sim
