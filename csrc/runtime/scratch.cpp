#include "glm5/scratch.h"

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

namespace glm5 {
namespace {

constexpr size_t kAlign = 64;
constexpr size_t kSmallestBlock = size_t{1} << 20;

struct Release {
  void operator()(char* p) const { ::operator delete(p, std::align_val_t{kAlign}); }
};

struct Block {
  std::unique_ptr<char, Release> memory;
  size_t size = 0;
};

struct Stack {
  std::vector<Block> blocks;
  size_t block = 0;  // the block being filled
  size_t used = 0;   // bytes used in it
};

Stack& stack() {
  thread_local Stack instance;
  return instance;
}

}  // namespace

Scratch::Scratch() : block_(stack().block), used_(stack().used) {}

Scratch::~Scratch() {
  stack().block = block_;
  stack().used = used_;
}

void* Scratch::take_bytes(size_t bytes) {
  Stack& s = stack();
  bytes = (bytes + kAlign - 1) / kAlign * kAlign;
  if (s.block < s.blocks.size() && s.used + bytes > s.blocks[s.block].size) {
    ++s.block;
    s.used = 0;
  }
  // Blocks past the current one are free: one that is too small is replaced, never kept beside a larger one.
  if (s.block < s.blocks.size() && s.blocks[s.block].size < bytes) s.blocks.resize(s.block);
  if (s.block >= s.blocks.size()) {
    const size_t size = std::max(bytes, kSmallestBlock);
    Block fresh;
    fresh.memory.reset(static_cast<char*>(::operator new(size, std::align_val_t{kAlign})));
    fresh.size = size;
    s.blocks.push_back(std::move(fresh));
    s.block = s.blocks.size() - 1;
    s.used = 0;
  }
  char* p = s.blocks[s.block].memory.get() + s.used;
  s.used += bytes;
  return p;
}

}  // namespace glm5
