#include "glm5/ops/window_stride_indices.h"

#include "cpu/kernel.h"
#include "glm5/paged.h"

GLM5_KERNEL(window_stride_indices,
            (const Context& ctx, const TensorView& kv_lens, int64_t window, int64_t stride, int64_t topk,
             const TensorView& indices),
            (ctx, kv_lens, window, stride, topk, indices)) {
  (void)ctx;
  if (window < 0 || stride < 1) {
    fail("window_stride_indices: window, stride are %lld, %lld, need >= 0 and >= 1", static_cast<long long>(window),
         static_cast<long long>(stride));
  }
  const int32_t* lengths = kv_lens.data<int32_t>();
  check_range("window_stride_indices", "kv_lens", lengths, kv_lens.numel(), 0, INT32_MAX);
  int32_t* to = indices.out<int32_t>();
  parallel_for(kv_lens.numel(), rows_per_range(topk), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t length = lengths[t];
      const int64_t start = length > window ? length - window : 0;     // first key of the window
      const int64_t strided = start / stride + (start % stride != 0);  // multiples of stride before it
      const int64_t total = strided + length - start;
      int64_t entry = total > topk ? total - topk : 0;
      for (int64_t j = 0; j < topk; ++j, ++entry) {
        const int64_t position = entry < strided ? entry * stride : start + entry - strided;
        to[t * topk + j] = static_cast<int32_t>(entry < total ? position : -1);
      }
    }
  });
}
