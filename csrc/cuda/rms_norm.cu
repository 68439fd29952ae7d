// One block a row. A thread's chain goes over chunks of eight neighbouring elements, whichever way they are loaded, so
// a row's bits depend on its length alone.
#include "cuda/dev/launch.h"
#include "cuda/dev/smem.h"
#include "cuda/dev/sync.h"

namespace glm5::cuda {

constexpr int kNormThreads = 128, kNormChunk = 8;

// Eight elements from `at`; those past `n` are 0.
template <class T>
GLM5_DEVICE void load_chunk(const T* row, int at, int n, bool wide, float (&to)[kNormChunk]) {
  constexpr int kEach = 16 / sizeof(T);
  if (wide && at + kNormChunk <= n) {
    GLM5_UNROLL
    for (int i = 0; i < kNormChunk; i += kEach) {
      const dev::Wide words = dev::load_16(row + at + i);
      GLM5_UNROLL
      for (int j = 0; j < kEach; ++j) {
        const dev::u32 word = words.word[j * 4 / kEach];
        to[i + j] = sizeof(T) == 4 ? dev::float_of(word) : dev::float_of(j % 2 ? word & 0xffff0000u : word << 16);
      }
    }
    return;
  }
  GLM5_UNROLL
  for (int i = 0; i < kNormChunk; ++i) to[i] = at + i < n ? dev::widen(row[at + i]) : 0.0f;
}

__host__ __device__ constexpr dev::u32 rms_norm_shared() {
  return dev::SharedBytes{}.array<float>(kNormThreads / 32).used;
}

template <class T>
__global__ void __launch_bounds__(kNormThreads) rms_norm_kernel(const T* x, const T* weight, float eps, int n, T* y) {
  GLM5_SHARED_MEMORY(memory);
  const auto sums = memory.array<float>(kNormThreads / 32);
  const T* row = x + static_cast<dev::i64>(dev::block_x()) * n;
  T* to = y + static_cast<dev::i64>(dev::block_x()) * n;
  const bool wide = dev::aligned_16(row) && dev::aligned_16(weight);
  const int first = dev::thread_index() * kNormChunk, step = kNormThreads * kNormChunk;
  float sum = 0.0f, chunk[kNormChunk], scale[kNormChunk];
  for (int at = first; at < n; at += step) {
    load_chunk(row, at, n, wide, chunk);
    GLM5_UNROLL
    for (int i = 0; i < kNormChunk; ++i) sum = dev::fused(chunk[i], chunk[i], sum);
  }
  sum = dev::warp_sum(sum);
  if (dev::lane_index() == 0) sums[dev::warp_index()] = sum;
  dev::sync_threads();
  float all = 0.0f;
  for (int w = 0; w < kNormThreads / 32; ++w) all += sums[w];
  const float inverse = 1.0f / dev::square_root(all / static_cast<float>(n) + eps);
  for (int at = first; at < n; at += step) {
    load_chunk(row, at, n, wide, chunk);
    load_chunk(weight, at, n, wide, scale);
    GLM5_UNROLL
    for (int i = 0; i < kNormChunk; ++i) {
      if (at + i < n) to[at + i] = dev::narrow<T>(dev::round_to<T>(chunk[i] * inverse) * scale[i]);
    }
  }
}

}  // namespace glm5::cuda

#if !defined(__CUDACC_RTC__)

#include "cuda/host.h"
#include "glm5/ops/rms_norm.h"

namespace glm5 {

void rms_norm(const Context& ctx, const TensorView& x, const TensorView& weight, double eps, const TensorView& y) {
  cuda::for_type("rms_norm: x", x.dtype(), [&](auto type) {
    using T = decltype(type);
    dev::launch(ctx, "rms_norm", cuda::rms_norm_kernel<T>, {static_cast<unsigned>(x.rows()), 1, 1}, cuda::kNormThreads,
                cuda::rms_norm_shared(), cuda::in<T>(x), cuda::in<T>(weight), static_cast<float>(eps),
                static_cast<int>(x.dim(-1)), cuda::out<T>(y));
  });
}

}  // namespace glm5

#endif
