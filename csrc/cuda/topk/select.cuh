// The indexer's selection: one block walks over a token's keys, or several take a part of 8192 keys each and a second
// kernel selects among their best. The order is total, so both give the same keys.
#pragma once

#include "cuda/topk/score.cuh"

namespace glm5::cuda {

constexpr int kPartKeys = 8192;

struct IndexPointers {
  const float* iw;
  const int *block_table, *request_ids, *kv_lens;
  int* indices;
  float* scores;      // or null
  dev::u64* partial;  // [T, parts, K] entries, 0 where absent; null when blocks walk
};

// How many keys a token sees; a length that its pages do not hold counts as none.
GLM5_DEVICE int length_of(const IndexShape& shape, const IndexPointers& at, int token) {
  const int request = at.request_ids[token], length = at.kv_lens[token];
  const bool good = request >= 0 && request < shape.requests && length >= 0 &&
                    length <= static_cast<dev::i64>(shape.pages_each) * shape.page_size;
  return good ? length : 0;
}

GLM5_DEVICE void put_entry(const IndexShape& shape, const IndexPointers& at, int token, int i, dev::u64 entry) {
  const dev::i64 to = static_cast<dev::i64>(token) * shape.topk + i;
  at.indices[to] = entry == 0 ? -1 : position_of(entry);
  if (at.scores != nullptr) {
    at.scores[to] = entry == 0 ? -dev::infinity() : score_of(static_cast<dev::u32>(entry >> 32));
  }
}

// What is left of the stream is the answer, in ascending positions.
template <class Put>
GLM5_DEVICE void put_best(Best& best, int topk, const Put& put) {
  best.thin();
  for (int i = dev::thread_index(); i < topk; i += kTopkThreads) {
    put(i, i < best.count ? static_cast<dev::u64>(best.entries[i]) : dev::u64{0});
  }
}

template <class T>
GLM5_BOTH constexpr dev::u32 topk_shared(const IndexShape& shape) {
  return Best::bytes(IndexTiles<T>::bytes(shape), shape.topk).used;
}
GLM5_BOTH constexpr dev::u32 topk_merge_shared(const IndexShape& shape) {
  return Best::bytes(dev::SharedBytes{}, shape.topk).used;
}

// Grid: tokens, parts (or one).
template <class T, class Cache>
__global__ void __launch_bounds__(kTopkThreads, 2)
    topk_indexer_kernel(IndexShape shape, IndexPointers at, const T* iq, Cache cache, int parts) {
  GLM5_SHARED_MEMORY(memory);
  const IndexTiles<T> tiles(memory, shape);
  Best best(memory, shape.topk);
  const int token = dev::block_x(), part = dev::block_y();
  const int length = length_of(shape, at, token), request = at.request_ids[token];
  const int begin = parts == 1 ? 0 : part * kPartKeys;
  const int end = parts == 1 ? length : dev::least(length, begin + kPartKeys);
  constexpr int kKeys = tile_keys<T>();

  if (parts == 1 && length <= shape.topk && at.scores == nullptr) {
    for (int i = dev::thread_index(); i < shape.topk; i += kTopkThreads) {
      put_entry(shape, at, token, i, i < length ? entry_of(0.0f, i) : 0);
    }
    return;
  }
  load_queries(shape, iq, at.iw, token, tiles);
  if (begin < end) fetch_tile(shape, cache, at.block_table, request, begin, end, tiles);
  dev::cp_async_commit();
  for (int first = begin; first < end; first += kKeys) {
    dev::cp_async_wait<0>();
    dev::sync_threads();
    const float score = score_tile<Cache::kBytes>(shape, tiles, [&] {
      if (first + kKeys < end) fetch_tile(shape, cache, at.block_table, request, first + kKeys, end, tiles);
      dev::cp_async_commit();
    });
    const int position = first + dev::thread_index();
    const bool there =
        dev::thread_index() < kKeys && position < end && place_of(shape, at.block_table, request, position).page >= 0;
    best.offer(there ? entry_of(score, position) : 0);
  }
  dev::cp_async_wait<0>();
  put_best(best, shape.topk, [&](int i, dev::u64 entry) {
    if (at.partial == nullptr) return put_entry(shape, at, token, i, entry);
    at.partial[(static_cast<dev::i64>(token) * parts + part) * shape.topk + i] = entry;
  });
}

// One block a token: its parts in ascending order.
template <class Unused>
__global__ void __launch_bounds__(kTopkThreads, 2) topk_merge_kernel(IndexShape shape, IndexPointers at, int parts) {
  GLM5_SHARED_MEMORY(memory);
  Best best(memory, shape.topk);
  const int token = dev::block_x();
  const dev::i64 count = static_cast<dev::i64>(parts) * shape.topk;
  const dev::u64* from = at.partial + token * count;
  for (dev::i64 first = 0; first < count; first += kTopkThreads) {
    const dev::i64 i = first + dev::thread_index();
    best.offer(i < count ? from[i] : 0);
  }
  put_best(best, shape.topk, [&](int i, dev::u64 entry) { put_entry(shape, at, token, i, entry); });
}

}  // namespace glm5::cuda

#if !defined(__CUDACC_RTC__)

#include "cuda/dev/launch.h"
#include "cuda/host.h"
#include "glm5/paged.h"

namespace glm5::cuda {

template <class T, class Cache>
void launch_topk(const Context& ctx, const char* name, const IndexShape& shape, IndexPointers at, int64_t tokens,
                 int64_t longest, const T* iq, const Cache& cache) {
  const int64_t parts = (longest + kPartKeys - 1) / kPartKeys;
  const int64_t bytes = tokens * parts * shape.topk * static_cast<int64_t>(sizeof(dev::u64));
  const bool apart = parts > 1 && parts < 65536 && ctx.workspace_bytes >= bytes;
  at.partial = apart ? static_cast<dev::u64*>(ctx.workspace) : nullptr;
  const auto rows = static_cast<unsigned>(tokens), columns = apart ? static_cast<unsigned>(parts) : 1u;
  dev::launch(ctx, name, topk_indexer_kernel<T, Cache>, {rows, columns, 1}, kTopkThreads, topk_shared<T>(shape), shape,
              at, iq, cache, static_cast<int>(columns));
  if (!apart) return;
  dev::launch(ctx, name, topk_merge_kernel<void>, {rows, 1, 1}, kTopkThreads, topk_merge_shared(shape), shape, at,
              static_cast<int>(parts));
}

inline void select_topk(const Context& ctx, const char* name, const char* what, const TensorView& iq,
                        const TensorView& iw, const TensorView& index_cache, const TensorView& block_table,
                        const TensorView& request_ids, const TensorView& kv_lens, int64_t topk, int64_t max_kv_len,
                        const char* format, const TensorView& indices, float* scores) {
  const bool bytes = is_byte_format(name, format, "fp8");
  const int64_t dim = iq.dim(2), size = bytes ? index_cache.dim(1) / (dim + 4) : index_cache.dim(1);
  if (iq.dim(1) > kMostIndexHeads || dim > kMostIndexDim || topk > kMostTopk) {
    fail("%s: Hi, Di and K are %lld, %lld and %lld, needs at most %d, %d and %d", name,
         static_cast<long long>(iq.dim(1)), static_cast<long long>(dim), static_cast<long long>(topk), kMostIndexHeads,
         kMostIndexDim, kMostTopk);
  }
  const IndexShape shape{static_cast<int>(iq.dim(1)),
                         static_cast<int>(dim),
                         static_cast<int>(topk),
                         static_cast<int>(block_table.dim(0)),
                         static_cast<int>(block_table.dim(1)),
                         static_cast<int>(index_cache.dim(0)),
                         static_cast<int>(size)};
  dev::check_on_host([&] {
    check_lengths(name, PageTable(block_table, shape.pages, shape.page_size), request_ids, kv_lens, max_kv_len);
  });
  const IndexPointers at{iw.data<float>(),
                         block_table.data<int32_t>(),
                         request_ids.data<int32_t>(),
                         kv_lens.data<int32_t>(),
                         indices.out<int32_t>(),
                         scores,
                         nullptr};
  const int64_t capacity = static_cast<int64_t>(shape.pages_each) * shape.page_size;
  const int64_t longest = max_kv_len < capacity ? max_kv_len : capacity;
  for_type(what, iq.dtype(), [&](auto type) {
    using T = decltype(type);
    if (bytes) {
      launch_topk(ctx, name, shape, at, iq.dim(0), longest, in<T>(iq), ByteKeys{index_cache.data<uint8_t>()});
    } else {
      launch_topk(ctx, name, shape, at, iq.dim(0), longest, in<T>(iq), PlainKeys<T>{in<T>(index_cache)});
    }
  });
}

}  // namespace glm5::cuda

#endif
