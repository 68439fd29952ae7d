// Who touched which bytes of shared memory last, and whether a later access is ordered behind: a race detector by
// vector clocks. It sees a missing barrier in every order of execution, and bytes that nobody wrote.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sim/cuda/site.h"

namespace glm5::sim {

enum class Access { read, write, atomic, copy };

// What an access collided with.
struct Conflict {
  enum Kind { none, unwritten, pending, race } kind = none;
  bool earlier_wrote = false;
  unsigned thread = 0;
  Site at{};
};

class RaceDetector {
 public:
  static constexpr unsigned kGranule = 2;  // bytes that share a record

  void reset(unsigned threads, size_t bytes);

  // Records an access of `bytes` bytes at `offset` by `thread`. A `copy` is a write that has not landed: whoever
  // touches it before land() collides.
  Conflict touch(Access access, unsigned thread, size_t offset, size_t bytes, Site at);
  // A pending copy has landed and `thread` has waited for it.
  void land(unsigned thread, size_t offset, size_t bytes, Site at);

  // Everything the listed threads did happens before everything they do from now on.
  void join(const unsigned* threads, unsigned count);
  void join_all();
  // Whether a thread has been at so many meetings that its clock would run over: about a million.
  bool exhausted(unsigned thread) const;
  // What `thread` has done and seen, added to `clock`; taken from it. For barriers that some arrive at and others wait
  // for.
  void release(unsigned thread, std::vector<uint32_t>& clock);
  void acquire(unsigned thread, const std::vector<uint32_t>& clock);

 private:
  struct Record {
    uint32_t write;
    uint32_t read[2];
    uint16_t write_site, read_site[2];
  };

  uint16_t intern(Site at);
  bool ordered(unsigned thread, uint32_t stamp) const;
  Conflict conflict(Conflict::Kind kind, uint32_t stamp, uint16_t site, bool wrote) const;

  unsigned threads_ = 0;
  std::vector<Record> records_;
  std::vector<uint32_t>
      seen_;  // [thread][other]: how far of `other` happens before `thread` now; own entry = own clock
  std::vector<Site> sites_;
  std::vector<uint16_t> site_table_;
};

}  // namespace glm5::sim
