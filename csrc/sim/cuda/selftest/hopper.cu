// A warp-specialised product by tensor copies and warpgroup products, 64 x 64 x 64, and what can be wrong with it.
#include "cuda/dev/hopper.h"
#include "cuda/dev/sync.h"
#include "sim/cuda/selftest/selftest.h"

namespace glm5::sim {
namespace {

using dev::bf16;

enum class Fault {
  none,
  no_full_wait,
  no_empty_wait,
  early_release,
  result_in_flight,
  over_arrival,
  no_init,
  no_arrival
};

constexpr int kThreads = 160, kTile = 64 * 64, kTileBytes = kTile * 2, kRounds = 4;

// out = rounds of in inT, four times the same product; warps 0 to 3 multiply, warp 4 fetches into one stage.
template <Fault F>
__global__ void product(const __grid_constant__ dev::TensorMap map, float* out) {
  GLM5_SHARED_MEMORY(memory);
  const auto a = memory.array<bf16>(kTile);
  const auto full = memory.array<dev::u64>(1), empty = memory.array<dev::u64>(1);
  if (dev::thread_index() == 0 && F != Fault::no_init) {
    dev::mbarrier_init(full, 1);
    dev::mbarrier_init(empty, 128);
    dev::mbarrier_fence();
  }
  if (dev::thread_index() == 0 && F == Fault::no_init) full[0] = empty[0] = 0;
  dev::sync_threads();
  if (dev::warp_index() == 4) {
    for (int k = 0; k < kRounds && dev::lane_index() == 0; ++k) {
      if (F != Fault::no_empty_wait) dev::mbarrier_wait(empty, (k & 1) ^ 1);
      if (F != Fault::no_arrival) dev::mbarrier_arrive_expect(full, kTileBytes);
      if (F == Fault::over_arrival) dev::mbarrier_arrive(full);  // BUG over_arrival
      dev::tma_load(a, map, 0, 0, full);                         // BUG no_empty_wait early_release
    }
    return;
  }
  float d[32] = {};
  for (int k = 0; k < kRounds; ++k) {
    if (F != Fault::no_full_wait) dev::mbarrier_wait(full, k & 1);  // BUG no_init no_arrival
    dev::wgmma_fence();
    for (int i = 0; i < 4; ++i) {
      const auto tile = dev::swizzled_descriptor(a) + i * 2;
      dev::wgmma_64x64x16(d, tile, tile, true);  // BUG no_full_wait
    }
    dev::wgmma_commit();  // BUG result_in_flight
    if (F == Fault::early_release) dev::mbarrier_arrive(empty);
    if (F != Fault::result_in_flight) dev::wgmma_wait<0>();
    if (F != Fault::early_release) dev::mbarrier_arrive(empty);
  }
  const int row = dev::warp_index() * 16 + dev::lane_index() / 4, column = 2 * (dev::lane_index() % 4);
  for (int i = 0; i < 32; ++i) out[(row + i / 2 % 2 * 8) * 64 + column + i / 4 * 8 + i % 2] = d[i];
}

// The simulator takes a map as it is; for a device the driver encodes it.
dev::TensorMap map_of(const unsigned short* in) {
#if defined(GLM5_CUDA_SIM)
  return dev::TensorMap{reinterpret_cast<const unsigned char*>(in), 64, 64, 128, 64, 64};
#else
  (void)in;
  return dev::TensorMap{};
#endif
}

template <Fault F>
void run(bool bug, const unsigned short* in, float* out) {
  dev::launch(Context{}, "selftest", bug ? product<F> : product<Fault::none>, {1, 1, 1}, kThreads, 16384, map_of(in),
              out);
}

}  // namespace

std::vector<SelfTest> hopper_selftests() {
#define GLM5_SELFTEST(name) \
  SelfTest {                \
    #name, run<Fault::name> \
  }
  return {GLM5_SELFTEST(no_full_wait),     GLM5_SELFTEST(no_empty_wait), GLM5_SELFTEST(early_release),
          GLM5_SELFTEST(result_in_flight), GLM5_SELFTEST(over_arrival),  GLM5_SELFTEST(no_init),
          GLM5_SELFTEST(no_arrival)};
}

}  // namespace glm5::sim
