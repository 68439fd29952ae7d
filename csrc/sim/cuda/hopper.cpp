#include "sim/cuda/hopper.h"

#include <cstdio>
#include <cstring>

namespace glm5::sim {
namespace {

constexpr unsigned kRowBytes = 128, kChunk = 16;

Mbarrier& find(Block& block, Shared<unsigned long long> barrier, Site at) {
  for (auto& b : block.units().barriers) {
    if (b->address == barrier.raw()) return *b;
  }
  block.fail_at(at, "mbarrier: used before mbarrier_init");
}

void maybe_complete(Block& block, Mbarrier& b) {
  if (b.missing != 0 || b.bytes != 0) return;
  b.phase ^= 1u;
  b.missing = b.expected;
  for (unsigned t : b.waiting) block.make_ready(t);
  b.waiting.clear();
}

void arrive(Block& block, Mbarrier& b, Site at) {
  if (b.missing == 0) {
    block.fail_at(at, "mbarrier: arrival %u of a phase that expects %u", b.expected + 1, b.expected);
  }
  block.races().release(block.thread().linear, b.clock);
  --b.missing;
  maybe_complete(block, b);
}

void land(Block& block, const BoxCopy& c) {
  block.moving(c.at);
  for (unsigned r = 0; r < c.map.box_rows; ++r) {
    for (unsigned x = 0; x < c.map.box_columns; ++x) {
      const unsigned byte = x * 2;
      unsigned char* to = c.to + r * kRowBytes + ((byte / kChunk) ^ (r & 7u)) * kChunk + byte % kChunk;
      const long long column = c.column + x, row = c.row + r;
      if (column >= 0 && row >= 0 && column < c.map.columns && row < c.map.rows) {
        std::memcpy(to, c.map.base + row * c.map.pitch + column * 2, 2);
      } else {
        std::memset(to, 0, 2);
      }
    }
  }
  block.moving(Site{});
  const unsigned bytes = c.map.box_columns * c.map.box_rows * 2;
  block.races().land(c.issuer, static_cast<size_t>(c.to - block.shared()), bytes, c.at);
  // The copy is done before the phase is: whoever waits for the phase sees it.
  block.races().release(c.issuer, c.barrier->clock);
  c.barrier->bytes -= bytes;
  maybe_complete(block, *c.barrier);
}

// All threads of a warpgroup meet; the last runs compute(group) for all.
template <class F>
void meet(const char* what, void* argument, Site at, const F& compute) {
  Block& block = *Block::current();
  const unsigned me = block.thread().linear;
  if (me / kWarpgroup >= block.units().warpgroups.size()) {
    block.fail_at(at, "%s: thread %u belongs to no whole warpgroup, needs 128 threads", what, me);
  }
  Warpgroup& g = block.units().warpgroups[me / kWarpgroup];
  if (g.arrived == 0) {
    g.what = what;
    g.at = at;
  } else if (g.at.line != at.line || g.what != what) {
    char other[256];
    Block::describe(other, sizeof other, g.at);
    block.fail_at(at, "divergent warpgroup: %s while others wait at %s, %s", what, g.what, other);
  }
  g.argument[me % kWarpgroup] = argument;
  if (++g.arrived < kWarpgroup) {
    g.waiting.push_back(me);
    block.wait(what, at);
    return;
  }
  g.arrived = 0;
  compute(block, g);
  for (unsigned t : g.waiting) block.make_ready(t);
  g.waiting.clear();
}

// Decodes a descriptor as the hardware does: start and distance of eight rows in 16 bytes, then the swizzle.
float element(Block& block, uint64_t descriptor, unsigned row, unsigned column) {
  size_t at = ((descriptor & 0x3fff) << 4) + (row / 8) * (((descriptor >> 32) & 0x3fff) << 4) + row % 8 * kRowBytes +
              column * 2;
  at ^= (at / kRowBytes % 8) * kChunk;
  if (at + 2 > block.shared_bytes()) return __builtin_nanf("");
  uint16_t bits;
  std::memcpy(&bits, block.shared() + at, sizeof bits);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// The matrix unit reads a tile of 64 rows while the caller goes on: once when it is told to, once when it is waited
// for.
void read_tile(Block& block, uint64_t descriptor, Site at) {
  unsigned char* p = block.shared() + (((descriptor & 0x3fff) << 4) & ~size_t{1023});
  block.touch(Access::read, p, size_t{64} * kRowBytes, block.shared(), block.shared() + block.shared_bytes(), 1024, at);
}

void multiply(Block& block, const GroupProduct& p) {
  float a[64][16], b[16][64];
  for (unsigned i = 0; i < 64; ++i) {
    for (unsigned k = 0; k < 16; ++k) {
      a[i][k] = element(block, p.a, i, k);
      b[k][i] = element(block, p.b, i, k);
    }
  }
  for (unsigned i = 0; i < 64; ++i) {
    float sum[64] = {};
    for (unsigned k = 0; k < 16; ++k) {
      for (unsigned j = 0; j < 64; ++j) sum[j] += a[i][k] * b[k][j];
    }
    for (unsigned j = 0; j < 64; ++j) {
      const unsigned thread = i / 16 * 32 + i % 8 * 4 + j % 8 / 2, slot = j / 8 * 4 + i / 8 % 2 * 2 + j % 2;
      float& d = p.d[thread][slot];
      d = (p.accumulate ? d : 0.0f) + sum[j];
    }
  }
}

}  // namespace

void AsyncUnits::reset(unsigned warps) {
  barriers.clear();
  copies.clear();
  warpgroups.assign(warps * kWarp / kWarpgroup, Warpgroup{});
}
void AsyncUnits::drop() {
  reset(0);
}

void AsyncUnits::advance(Block& block, bool idle) {
  const bool random = block.settings().copies == Copies::random;
  while (!copies.empty() && (idle || (random && (block.random() & 7) == 0))) {
    const size_t at = random ? block.random() % copies.size() : 0;
    const BoxCopy copy = copies[at];
    copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(at));
    land(block, copy);
    if (idle && block.has_ready()) return;
  }
}

void AsyncUnits::check_idle(char* fault, size_t size, const char* kernel) {
  char place[256];
  if (!copies.empty()) {
    Block::describe(place, sizeof place, copies.front().at);
    std::snprintf(fault, size, "%s: the block ends before its TMA copy is complete, at %s", kernel, place);
  }
  for (const Warpgroup& g : warpgroups) {
    if (g.open.empty() && g.groups.empty()) continue;
    Block::describe(place, sizeof place, g.at);
    std::snprintf(fault, size, "%s: the block ends with wgmma under way, last at %s", kernel, place);
  }
}

void mbarrier_init(Shared<unsigned long long> barrier, uint32_t count, Site at) {
  Block& block = *Block::current();
  barrier.touch(Access::write, 8, 8, at);
  auto& all = block.units().barriers;
  for (auto& b : all) {
    if (b->address == barrier.raw()) block.fail_at(at, "mbarrier: initialised twice");
  }
  all.push_back(std::make_unique<Mbarrier>(Mbarrier{barrier.raw(), 0, count, count, 0, {}, {}}));
}

void mbarrier_arrive(Shared<unsigned long long> barrier, Site at) {
  Block& block = *Block::current();
  barrier.touch(Access::read, 8, 8, at);
  arrive(block, find(block, barrier, at), at);
}
void mbarrier_arrive_expect(Shared<unsigned long long> barrier, uint32_t bytes, Site at) {
  Block& block = *Block::current();
  barrier.touch(Access::read, 8, 8, at);
  Mbarrier& b = find(block, barrier, at);
  b.bytes += bytes;
  arrive(block, b, at);
}

void mbarrier_wait(Shared<unsigned long long> barrier, uint32_t parity, Site at) {
  Block& block = *Block::current();
  barrier.touch(Access::read, 8, 8, at);
  Mbarrier& b = find(block, barrier, at);
  if (block.settings().order == Order::random) block.yield();
  while (b.phase == (parity & 1u)) {
    b.waiting.push_back(block.thread().linear);
    block.wait("mbarrier_wait", at);
  }
  block.races().acquire(block.thread().linear, b.clock);
}

void copy_box(Block& block, unsigned char* to, const TensorMap& map, long long column, long long row,
              Shared<unsigned long long> barrier, Site at) {
  if (map.box_columns * 2 != kRowBytes) {
    block.fail_at(at, "tma_load: a box has rows of %u bytes, needs 128 for the swizzle", map.box_columns * 2);
  }
  const BoxCopy copy{to, map, column, row, &find(block, barrier, at), block.thread().linear, at};
  if (block.settings().copies == Copies::early) {
    land(block, copy);
  } else {
    block.units().copies.push_back(copy);
  }
}

uint64_t swizzled_descriptor(const void* p) {
  const auto offset = static_cast<uint64_t>(static_cast<const unsigned char*>(p) - Block::current()->shared());
  return ((offset & 0x3ffff) >> 4) | (uint64_t{1} << 16) | (uint64_t{64} << 32) | (uint64_t{1} << 62);
}

void wgmma_64x64x16(float (&d)[32], uint64_t a, uint64_t b, bool accumulate, Site at) {
  struct Mine {
    float* d;
    uint64_t a, b;
    bool accumulate;
  } mine{d, a, b, accumulate};
  meet("wgmma", &mine, at, [at](Block& block, Warpgroup& g) {
    GroupProduct p{};
    const Mine& first = *static_cast<Mine*>(g.argument[0]);
    for (unsigned i = 0; i < kWarpgroup; ++i) {
      const Mine& m = *static_cast<Mine*>(g.argument[i]);
      if (m.a != first.a || m.b != first.b) block.fail_at(at, "wgmma: descriptors differ within the warpgroup");
      p.d[i] = m.d;
    }
    p.a = first.a;
    p.b = first.b;
    p.accumulate = first.accumulate;
    p.at = at;
    read_tile(block, p.a, at);
    read_tile(block, p.b, at);
    if (block.settings().copies == Copies::early) {
      multiply(block, p);
      p.done = true;
    }
    g.open.push_back(p);
  });
}
void wgmma_commit(Site at) {
  meet("wgmma_commit", nullptr, at, [](Block&, Warpgroup& g) {
    g.groups.push_back(std::move(g.open));
    g.open.clear();
  });
}
void wgmma_wait_pending(unsigned pending, Site at) {
  meet("wgmma_wait", nullptr, at, [pending](Block& block, Warpgroup& g) {
    while (g.groups.size() > pending) {
      for (const GroupProduct& p : g.groups.front()) {
        read_tile(block, p.a, p.at);
        read_tile(block, p.b, p.at);
        if (!p.done) multiply(block, p);
      }
      g.groups.erase(g.groups.begin());
    }
  });
}

}  // namespace glm5::sim
