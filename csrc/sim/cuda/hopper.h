// Hopper's asynchronous units: mbarriers, the copy engine (TMA) and the warpgroups' matrix unit (wgmma).
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "sim/cuda/shared.h"

namespace glm5::sim {

// A matrix of 16-bit elements in global memory, and the box that a copy takes of it: cuTensorMap's meaning.
struct TensorMap {
  const unsigned char* base;
  long long columns, rows;
  long long pitch;  // bytes
  unsigned box_columns, box_rows;
};

// One mbarrier: which phase, how many arrivals and bytes are missing.
struct Mbarrier {
  const void* address;
  uint32_t phase, expected, missing;
  long long bytes;
  std::vector<uint32_t> clock;
  std::vector<unsigned> waiting;
};

struct BoxCopy {
  unsigned char* to;
  TensorMap map;
  long long column, row;
  Mbarrier* barrier;
  unsigned issuer;
  Site at;
};

// Sum += A B for 64 x 64 x 16 of bf16, operands by descriptor, the sum in 32 registers of 128 threads.
struct GroupProduct {
  std::array<float*, kWarpgroup> d;
  uint64_t a, b;
  bool accumulate, done;
  Site at;
};
struct Warpgroup {
  unsigned arrived = 0;
  const char* what = nullptr;
  Site at{};
  void* argument[kWarpgroup];
  std::vector<unsigned> waiting;
  std::vector<GroupProduct> open;
  std::vector<std::vector<GroupProduct>> groups;
};

struct AsyncUnits {
  std::vector<std::unique_ptr<Mbarrier>> barriers;
  std::vector<BoxCopy> copies;
  std::vector<Warpgroup> warpgroups;

  void reset(unsigned warps);
  // Lets the copy engine move: all the time in no order (random), or only when nobody else can (late).
  void advance(Block& block, bool idle);
  // Writes a sentence when the block ends with work under way.
  void check_idle(char* fault, size_t size, const char* kernel);
  void drop();
};

void mbarrier_init(Shared<unsigned long long> barrier, uint32_t count, GLM5_SIM_SITE);
void mbarrier_arrive(Shared<unsigned long long> barrier, GLM5_SIM_SITE);
void mbarrier_arrive_expect(Shared<unsigned long long> barrier, uint32_t bytes, GLM5_SIM_SITE);
// Until the phase of this parity is complete.
void mbarrier_wait(Shared<unsigned long long> barrier, uint32_t parity, GLM5_SIM_SITE);

void copy_box(Block& block, unsigned char* to, const TensorMap& map, long long column, long long row,
              Shared<unsigned long long> barrier, Site at);
// The box at (column, row) in the 128-byte swizzle; what lies outside of the matrix becomes 0.
template <class T>
void tma_load(Shared<T> to, const TensorMap& map, int column, int row, Shared<unsigned long long> barrier,
              GLM5_SIM_SITE) {
  to.touch(Access::copy, size_t{map.box_columns} * map.box_rows * 2, 1024, at);
  copy_box(*Block::current(), reinterpret_cast<unsigned char*>(to.raw()), map, column, row, barrier, at);
}

// The descriptor of rows of 64 16-bit elements in the 128-byte swizzle, 8 rows to 1024 bytes.
uint64_t swizzled_descriptor(const void* p);
void wgmma_64x64x16(float (&d)[32], uint64_t a, uint64_t b, bool accumulate, GLM5_SIM_SITE);
void wgmma_commit(GLM5_SIM_SITE);
void wgmma_wait_pending(unsigned pending, Site at);
template <int Pending>
void wgmma_wait(GLM5_SIM_SITE) {
  wgmma_wait_pending(Pending, at);
}

}  // namespace glm5::sim
