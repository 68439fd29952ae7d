#include "sim/cuda/async_copy.h"

#include <cstring>

namespace glm5::sim {
namespace {

void land_bytes(Block& block, const Copy& copy) {
  block.moving(copy.at);
  if (copy.valid != 0) std::memcpy(copy.to, copy.from, copy.valid);
  block.moving(Site{});
  std::memset(copy.to + copy.valid, 0, copy.bytes - copy.valid);
}

}  // namespace

void cp_async(Block& block, unsigned char* to, const unsigned char* from, unsigned valid, Site at) {
  if (valid != 0 && reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    block.fail_at(at, "cp.async: the source %p is unaligned, needs 16 bytes", static_cast<const void*>(from));
  }
  Copy copy{to, from, 16, valid, false, at};
  const Copies when = block.settings().copies;
  if (when == Copies::early || (when == Copies::random && (block.random() & 1) != 0)) {
    land_bytes(block, copy);
    copy.landed = true;
  }
  block.thread().open.push_back(copy);
}

void cp_async_commit(Block& block) {
  Thread& t = block.thread();
  t.groups.push_back(std::move(t.open));
  t.open.clear();
}

void cp_async_wait(Block& block, unsigned pending, Site at) {
  Thread& t = block.thread();
  while (t.groups.size() > pending) {
    for (const Copy& copy : t.groups.front()) {
      if (!copy.landed) land_bytes(block, copy);
      block.land(copy, at);
    }
    t.groups.erase(t.groups.begin());
  }
}

}  // namespace glm5::sim
