// Attention over selected keys of a paged latent cache: kernels in attention/, the merge of splits, and the launcher.
#include "cuda/attention/bf16.cuh"
#include "cuda/attention/f32.cuh"
#include "cuda/dev/launch.h"

namespace glm5::cuda {

// One block a head of a token: its splits in ascending order, as a walking block would merge them.
template <class T>
__global__ void __launch_bounds__(kAttentionThreads)
    merge_splits_kernel(AttentionShape shape, AttentionPointers at, T* out) {
  const int token = dev::block_x(), head = dev::block_y();
  const dev::i64 line = static_cast<dev::i64>(token) * shape.heads + head;
  for (int column = dev::thread_index(); column < shape.latent; column += kAttentionThreads) {
    float most = -dev::infinity(), sum = 0.0f, value = 0.0f;
    for (int split = 0; split < shape.splits(); ++split) {
      const float* from = partial_of(shape, at, token, head, split);
      const MergeFactors f = merge_split(from[0], from[1], most, sum);
      value = merged(from[2 + column], value, f.old, f.fresh);
    }
    out[line * shape.latent + column] = dev::narrow<T>(finished(value, sum));
    if (column == 0) at.lse[line] = finished_lse(most, sum);
  }
}

}  // namespace glm5::cuda

#if !defined(__CUDACC_RTC__)

#include "cuda/host.h"
#include "glm5/ops/sparse_flash_attention.h"
#include "glm5/paged.h"

namespace glm5 {
namespace {

using cuda::AttentionPointers;
using cuda::AttentionShape;

// The scratch memory that lets every split have a block of its own; with less, blocks walk over their splits.
int64_t partial_bytes(const AttentionShape& shape, int64_t tokens) {
  return tokens * shape.heads * shape.splits() * (shape.latent + 2) * static_cast<int64_t>(sizeof(float));
}

template <class T, class Cache>
void attend(const Context& ctx, const AttentionShape& shape, const AttentionPointers& at, int64_t tokens, const T* q,
            const Cache& cache, T* out) {
  const char* name = "sparse_flash_attention";
  const auto tiles = static_cast<unsigned>((shape.heads + shape.heads_each() - 1) / shape.heads_each());
  const unsigned splits = at.partial == nullptr ? 1 : static_cast<unsigned>(shape.splits());
  const dev::Grid grid{static_cast<unsigned>(tokens), tiles, splits};
  if constexpr (sizeof(T) == 4) {
    dev::launch(ctx, name, cuda::attention_f32_kernel<Cache>, grid, cuda::kAttentionThreads,
                cuda::f32_attention_shared(shape), shape, at, q, cache, out);
  } else {
    dev::launch(ctx, name, cuda::attention_bf16_kernel<Cache>, grid, cuda::kAttentionThreads,
                cuda::bf16_attention_shared(shape), shape, at, q, cache, out);
  }
  if (at.partial == nullptr) return;
  dev::launch(ctx, name, cuda::merge_splits_kernel<T>, {grid.x, static_cast<unsigned>(shape.heads), 1},
              cuda::kAttentionThreads, 0, shape, at, out);
}

}  // namespace

void sparse_flash_attention(const Context& ctx, const TensorView& q, const TensorView& kv_cache,
                            const TensorView& block_table, const TensorView& request_ids, const TensorView& indices,
                            double scale, int64_t v_dim, const char* format, const TensorView& out,
                            const TensorView& lse) {
  const bool bytes = is_byte_format("sparse_flash_attention", format, "fp8_ds_mla");
  const int64_t heads = q.dim(1), groups = indices.dim(1), rope = q.dim(2) - v_dim, tokens = q.dim(0);
  if (groups != 1 && groups != heads) {
    fail("sparse_flash_attention: G is %lld, needs 1 or H = %lld: one selection for all heads or one each",
         static_cast<long long>(groups), static_cast<long long>(heads));
  }
  if (v_dim > cuda::kMostLatent || rope > cuda::kMostRope) {
    fail("sparse_flash_attention: C and R are %lld and %lld, needs at most %d and %d", static_cast<long long>(v_dim),
         static_cast<long long>(rope), cuda::kMostLatent, cuda::kMostRope);
  }
  const AttentionShape shape{static_cast<int>(heads),
                             static_cast<int>(v_dim),
                             static_cast<int>(rope),
                             static_cast<int>(indices.dim(2)),
                             groups != 1,
                             static_cast<int>(block_table.dim(0)),
                             static_cast<int>(block_table.dim(1)),
                             static_cast<int>(kv_cache.dim(0)),
                             static_cast<int>(kv_cache.dim(1)),
                             static_cast<float>(scale)};
  dev::check_on_host([&] {
    check_selections("sparse_flash_attention", PageTable(block_table, shape.pages, shape.page_size), request_ids,
                     indices);
  });
  const bool apart = shape.splits() > 1 && ctx.workspace_bytes >= partial_bytes(shape, tokens);
  const AttentionPointers at{block_table.data<int32_t>(), request_ids.data<int32_t>(), indices.data<int32_t>(),
                             lse.out<float>(), apart ? static_cast<float*>(ctx.workspace) : nullptr};
  cuda::for_type("sparse_flash_attention: q", q.dtype(), [&](auto type) {
    using T = decltype(type);
    if (bytes) {
      attend(ctx, shape, at, tokens, cuda::in<T>(q), cuda::ByteCache{kv_cache.data<uint8_t>()}, cuda::out<T>(out));
    } else {
      attend(ctx, shape, at, tokens, cuda::in<T>(q), cuda::PlainCache<T>{cuda::in<T>(kv_cache)}, cuda::out<T>(out));
    }
  });
}

}  // namespace glm5

#endif
