// Shared and global memory: barriers that are missing, copies that nobody waits for, addresses that lie outside.
#include "cuda/dev/mma_sm80.h"
#include "cuda/dev/sync.h"
#include "sim/cuda/selftest/selftest.h"

namespace glm5::sim {
namespace {

using dev::bf16;

constexpr int kThreads = 64;

template <bool Bug>
__global__ void missing_barrier(const bf16* in, float* out) {
  GLM5_SHARED_MEMORY(memory);
  const auto tile = memory.array<float>(kThreads);
  const int i = dev::thread_index();
  tile[i] = dev::widen(in[i]);
  if (!Bug) dev::sync_threads();
  out[i] = tile[kThreads - 1 - i];  // BUG missing_barrier
}

template <bool Bug>
__global__ void missing_warp_barrier(const bf16* in, float* out) {
  GLM5_SHARED_MEMORY(memory);
  const auto tile = memory.array<float>(kThreads);
  const int i = dev::thread_index();
  tile[i] = dev::widen(in[i]);
  if (!Bug) dev::sync_warp();
  out[i] = tile[i ^ 1];  // BUG missing_warp_barrier
}

// Reads that another thread overwrites: the barrier between the rounds is missing.
template <bool Bug>
__global__ void missing_second_barrier(const bf16* in, float* out) {
  GLM5_SHARED_MEMORY(memory);
  const auto tile = memory.array<float>(kThreads);
  const int i = dev::thread_index();
  float sum = 0.0f;
  for (int round = 0; round < 2; ++round) {
    tile[i] = dev::widen(in[round * kThreads + i]);  // BUG missing_second_barrier
    dev::sync_threads();
    sum += tile[kThreads - 1 - i];
    if (!Bug) dev::sync_threads();
  }
  out[i] = sum;
}

template <bool Bug>
__global__ void missing_copy_wait(const bf16* in, float* out) {
  GLM5_SHARED_MEMORY(memory);
  const auto tile = memory.array<bf16>(kThreads * 8);
  const int i = dev::thread_index();
  dev::cp_async_16(tile + i * 8, in + i * 8);
  dev::cp_async_commit();
  dev::cp_async_wait<Bug ? 1 : 0>();
  dev::sync_threads();
  out[i] = dev::widen(tile[(kThreads - 1 - i) * 8]);  // BUG missing_copy_wait
  dev::cp_async_wait<0>();
}

// The wait is there, but only the thread that copied has waited.
template <bool Bug>
__global__ void missing_barrier_after_copy(const bf16* in, float* out) {
  GLM5_SHARED_MEMORY(memory);
  const auto tile = memory.array<bf16>(kThreads * 8);
  const int i = dev::thread_index();
  dev::cp_async_16(tile + i * 8, in + i * 8);
  dev::cp_async_commit();
  dev::cp_async_wait<0>();
  if (!Bug) dev::sync_threads();
  out[i] = dev::widen(tile[(kThreads - 1 - i) * 8]);  // BUG missing_barrier_after_copy
}

// Two stages; the next copy goes to a stage that others may still read.
template <bool Bug>
__global__ void early_refill(const bf16* in, float* out) {
  GLM5_SHARED_MEMORY(memory);
  const auto tile = memory.array<bf16>(2 * kThreads * 8);
  const int i = dev::thread_index();
  dev::cp_async_16(tile + i * 8, in + i * 8);
  dev::cp_async_commit();
  float sum = 0.0f;
  for (int round = 0; round < 4; ++round) {
    const int from = ((round + 1) * kThreads + i) * 8 % kSelfTestValues, to = ((round + 1) % 2 * kThreads + i) * 8;
    dev::cp_async_16(tile + to, in + from);  // BUG early_refill
    dev::cp_async_commit();
    dev::cp_async_wait<1>();
    dev::sync_threads();
    sum += dev::widen(tile[(round % 2 * kThreads + kThreads - 1 - i) * 8]);
    if (!Bug) dev::sync_threads();
  }
  dev::cp_async_wait<0>();
  out[i] = sum;
}

template <bool Bug>
__global__ void copy_in_flight_at_end(const bf16* in, float* out) {
  GLM5_SHARED_MEMORY(memory);
  const auto tile = memory.array<bf16>(kThreads * 8);
  const int i = dev::thread_index();
  dev::cp_async_16(tile + i * 8, in + i * 8);  // BUG copy_in_flight_at_end
  dev::cp_async_commit();
  if (!Bug) dev::cp_async_wait<0>();
  out[i] = 0.0f;
}

template <bool Bug>
__global__ void unaligned_copy_source(const bf16* in, float* out) {
  GLM5_SHARED_MEMORY(memory);
  const auto tile = memory.array<bf16>(kThreads * 8);
  const int i = dev::thread_index();
  dev::cp_async_16(tile + i * 8, in + i * 8 + (Bug ? 1 : 0));  // BUG unaligned_copy_source
  dev::cp_async_commit();
  dev::cp_async_wait<0>();
  out[i] = 0.0f;
}

template <bool Bug>
__global__ void copy_behind_the_end(const bf16* in, float* out) {
  GLM5_SHARED_MEMORY(memory);
  const auto tile = memory.array<bf16>(kThreads * 8);
  const int i = dev::thread_index();
  dev::cp_async_16(tile + i * 8, in + (Bug ? kSelfTestValues : 0) + i * 8);  // BUG copy_behind_the_end
  dev::cp_async_commit();
  dev::cp_async_wait<0>();
  out[i] = 0.0f;
}

template <bool Bug>
__global__ void unaligned_matrix_row(const bf16* in, float* out) {
  GLM5_SHARED_MEMORY(memory);
  const auto tile = memory.array<bf16>(32 * 16);
  const int i = dev::thread_index();
  for (int k = 0; k < 8; ++k) tile[i * 8 + k] = in[i * 8 + k];
  dev::sync_threads();
  dev::u32 fragment[4];
  const int lane = dev::lane_index();
  dev::ldmatrix_x4(fragment, tile + ((lane & 15) * 16 + (lane >> 4) * (Bug ? 4 : 8)));  // BUG unaligned_matrix_row
  out[i] = static_cast<float>(fragment[0] & 1u);
}

template <bool Bug>
__global__ void outside_of_shared_array(const bf16* in, float* out) {
  GLM5_SHARED_MEMORY(memory);
  const auto tile = memory.array<float>(kThreads);
  const auto other = memory.array<float>(kThreads);
  const int i = dev::thread_index();
  other[i] = 0.0f;
  tile[i + (Bug ? 1 : 0)] = dev::widen(in[i]);  // BUG outside_of_shared_array
  out[i] = other[i];
}

template <bool Bug>
__global__ void arrays_exceed_launch(const bf16* in, float* out) {
  GLM5_SHARED_MEMORY(memory);
  const auto tile = memory.array<float>(Bug ? 1 << 20 : 16);  // BUG arrays_exceed_launch
  if (dev::thread_index() == 0) tile[0] = dev::widen(in[0]);
  out[dev::thread_index()] = 0.0f;
}

template <bool Bug>
__global__ void uninitialised_shared(const bf16* in, float* out) {
  GLM5_SHARED_MEMORY(memory);
  const auto tile = memory.array<float>(kThreads);
  const int i = dev::thread_index();
  if (!Bug || i != 7) tile[i] = dev::widen(in[i]);
  dev::sync_threads();
  out[i] = tile[i];  // BUG uninitialised_shared
}

template <bool Bug>
__global__ void read_behind_the_end(const bf16* in, float* out) {
  const int i = dev::thread_index();
  out[i] = dev::widen(in[kSelfTestValues - kThreads + i + (Bug ? 1 : 0)]);  // BUG read_behind_the_end
}
template <bool Bug>
__global__ void write_behind_the_end(const bf16* in, float* out) {
  const int i = dev::thread_index();
  out[(Bug ? kSelfTestValues : 0) + i] = dev::widen(in[i]);  // BUG write_behind_the_end
}
template <bool Bug>
__global__ void null_pointer(const bf16* in, float* out) {
  float* to = Bug ? nowhere() : out;
  to[dev::thread_index()] = dev::widen(in[0]);  // BUG null_pointer
}

template <void (*Good)(const bf16*, float*), void (*Bad)(const bf16*, float*)>
void run(bool bug, const unsigned short* in, float* out) {
  dev::launch(Context{}, "selftest", bug ? Bad : Good, {1, 1, 1}, kThreads, 8192, reinterpret_cast<const bf16*>(in),
              out);
}

}  // namespace

#define GLM5_SELFTEST(name)             \
  SelfTest {                            \
    #name, run<name<false>, name<true>> \
  }

std::vector<SelfTest> memory_selftests() {
  return {GLM5_SELFTEST(missing_barrier),
          GLM5_SELFTEST(missing_warp_barrier),
          GLM5_SELFTEST(missing_second_barrier),
          GLM5_SELFTEST(missing_copy_wait),
          GLM5_SELFTEST(missing_barrier_after_copy),
          GLM5_SELFTEST(early_refill),
          GLM5_SELFTEST(copy_in_flight_at_end),
          GLM5_SELFTEST(unaligned_copy_source),
          GLM5_SELFTEST(copy_behind_the_end),
          GLM5_SELFTEST(unaligned_matrix_row),
          GLM5_SELFTEST(outside_of_shared_array),
          GLM5_SELFTEST(arrays_exceed_launch),
          GLM5_SELFTEST(uninitialised_shared),
          GLM5_SELFTEST(read_behind_the_end),
          GLM5_SELFTEST(write_behind_the_end),
          GLM5_SELFTEST(null_pointer)};
}

}  // namespace glm5::sim
