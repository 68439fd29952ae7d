// The indexer's selection for every token, shared by the ops with and without scores.
#pragma once

#include "cpu/gemm_tile.h"
#include "cpu/kernel.h"
#include "cpu/rows/cache.h"
#include "cpu/rows/index_score.h"
#include "cpu/rows/index_score_bf16.h"
#include "cpu/rows/select.h"
#include "glm5/paged.h"

namespace glm5::GLM5_LEVEL_NS {

// key(slot, buffer): the key in place, or decoded into the buffer.
template <class T>
struct PlainKeys {
  using Stored = T;
  const T* rows;
  int64_t dim;
  GLM5_INLINE const T* key(int64_t slot, float*) const { return rows + slot * dim; }
};
struct Fp8Keys {
  using Stored = float;
  const uint8_t* pages;
  int64_t dim, size;
  GLM5_INLINE const float* key(int64_t slot, float* buffer) const {
    const int64_t page = slot / size;
    read_fp8_index_row(pages + page * size * (dim + 4), size, slot - page * size, dim, buffer);
    return buffer;
  }
};

struct TopkArguments {
  const TensorView &iq, &iw, &request_ids, &kv_lens;
  const PageTable& table;
  int64_t topk, longest, workspace_bytes;
  const TensorView& indices;
  const TensorView* scores;  // or null
};

// Neighbouring tokens of one request: they share the work of laying keys out.
struct TopkRun {
  int64_t first, tokens, keys;
  int64_t first_unit;
};

constexpr int64_t kRunTokens = 8;
constexpr int64_t kUnitKeys = 2048;  // keys of a unit of work
static_assert(kUnitKeys % kIndexPanel == 0, "a unit is whole panels");

// The keys [begin, end) of a run, for its tokens; orders has a row of `stride` for each token.
template <class T, class Cache>
inline void score_unit(const TopkArguments& a, const Cache& cache, const TopkRun& run, int64_t begin, int64_t end,
                       uint32_t* orders, int64_t stride) {
  const int64_t heads = a.iq.dim(1), dim = a.iq.dim(2);
  const T* iq = a.iq.data<T>();
  const float* iw = a.iw.data<float>();
  const int32_t *requests = a.request_ids.data<int32_t>(), *kv_lens = a.kv_lens.data<int32_t>();
  Scratch scratch;
  float* q = scratch.take<float>(run.tokens * heads * dim);
  float* panel = scratch.take<float>(dim * kIndexPanel);
  float* buffer = scratch.take<float>(kIndexPanel * dim);
  widen_row(iq + run.first * heads * dim, run.tokens * heads * dim, q);
  const typename Cache::Stored* keys[kIndexPanel];
  for (int64_t at = begin; at < end; at += kIndexPanel) {
    const int n = static_cast<int>(end - at < kIndexPanel ? end - at : kIndexPanel);
    for (int j = 0; j < n; ++j) keys[j] = cache.key(a.table.slot(requests[run.first], at + j), buffer + j * dim);
    fill_panel(keys, n, dim, panel);
    for (int64_t t = 0; t < run.tokens; ++t) {
      const int64_t left = kv_lens[run.first + t] - at;
      if (left <= 0) continue;
      score_panel(q + t * heads * dim, iw + (run.first + t) * heads, heads, dim, panel,
                  static_cast<int>(left < n ? left : n), orders + t * stride + at);
    }
  }
}

#if GLM5_LEVEL >= 4
// As score_unit, for bf16 queries and plain bf16 keys.
inline void score_bf16_unit(const TopkArguments& a, const PlainKeys<bf16>& cache, const TopkRun& run, int64_t begin,
                            int64_t end, uint32_t* orders, int64_t stride) {
  const int64_t heads = a.iq.dim(1), dim = a.iq.dim(2), pairs = IndexQuery::pair_count(heads, dim);
  const int64_t blocks = (heads + 15) / 16, width = (dim + 31) / 32 * 32;
  const bf16* iq = a.iq.data<bf16>();
  const float* iw = a.iw.data<float>();
  const int32_t *requests = a.request_ids.data<int32_t>(), *kv_lens = a.kv_lens.data<int32_t>();
  Scratch scratch;
  IndexQuery* queries = scratch.take<IndexQuery>(run.tokens);
  uint32_t* q = scratch.take<uint32_t>(run.tokens * pairs);
  float* weights = scratch.take<float>(run.tokens * blocks * 16);
  float* products = scratch.take<float>(blocks * kScoreKeys * 16);
  bf16* buffer = scratch.take<bf16>(kScoreKeys * width);
  for (int64_t t = 0; t < run.tokens; ++t) {
    queries[t] = index_query(iq + (run.first + t) * heads * dim, iw + (run.first + t) * heads, heads, dim,
                             q + t * pairs, weights + t * blocks * 16);
  }
#if GLM5_LEVEL >= 5
  Tiles tiles(16);
#endif
  for (int64_t at = begin; at < end; at += kScoreKeys) {
    const int64_t n = end - at < kScoreKeys ? end - at : kScoreKeys;
    const bf16* keys[kScoreKeys];
    bool in_place = n == kScoreKeys && dim % 32 == 0;
    for (int64_t j = 0; j < n; ++j) {
      keys[j] = cache.key(a.table.slot(requests[run.first], at + j), nullptr);
      // Tiles take rows at one distance; the two halves may lie apart.
      in_place = in_place && (GLM5_LEVEL < 5 || j % 16 == 0 || keys[j] == keys[j - 1] + dim);
    }
    for (int64_t j = 0; !in_place && j < kScoreKeys; ++j) {
      bf16* to = buffer + j * width;
      for (int64_t i = 0; i < width; i += 32) {
        const __mmask32 real = j < n ? first_elements(dim - i) : 0;
        _mm512_store_si512(to + i, _mm512_maskz_loadu_epi16(real, j < n ? keys[j] + i : to));
      }
      keys[j] = to;
    }
    for (int64_t t = 0; t < run.tokens; ++t) {
      if (kv_lens[run.first + t] <= at) continue;
      index_products(queries[t], keys, 2 * width, products);
      for (int half = 0; half < kScoreKeys; half += 16) {
        const u32v order = order_of_products(queries[t], products, half);
        std::memcpy(orders + t * stride + at + half, &order, sizeof order);
      }
    }
  }
}
#endif

// Tokens [t0, t1): scores, then selections.
template <class T, class Cache>
void select_tokens(const TopkArguments& a, const Cache& cache, int64_t t0, int64_t t1, uint32_t* orders, int64_t stride,
                   TopkRun* runs) {
  const int32_t *requests = a.request_ids.data<int32_t>(), *kv_lens = a.kv_lens.data<int32_t>();
  int32_t* indices = a.indices.out<int32_t>();
  float* scores = a.scores ? a.scores->out<float>() : nullptr;
  // A token that sees no more than K keys takes them all: only their scores may be asked for.
  auto scored = [=](int64_t t) { return requests[t] >= 0 && (scores || kv_lens[t] > a.topk) ? kv_lens[t] : 0; };
  int64_t count = 0, units = 0;
  for (int64_t t = t0; t < t1; ++count) {
    TopkRun& run = runs[count];
    run = {t, 0, 0, units};
    do {
      if (scored(t) > run.keys) run.keys = scored(t);
      ++run.tokens;
      ++t;
    } while (t < t1 && run.tokens < kRunTokens && requests[t] == requests[run.first]);
    units += (run.keys + kUnitKeys - 1) / kUnitKeys;
  }
  const int64_t work = kUnitKeys * a.iq.dim(1) * (a.iq.dim(2) + 1);
  parallel_for(units, (int64_t{1} << 16) / work + 1, [&](int64_t begin, int64_t end) {
    int64_t low = 0;
    for (int64_t high = count; high - low > 1;) {  // the last run that begins at or before the unit
      const int64_t middle = (low + high) / 2;
      (runs[middle].first_unit <= begin ? low : high) = middle;
    }
    for (int64_t unit = begin; unit < end; ++unit) {
      while (low + 1 < count && runs[low + 1].first_unit <= unit) ++low;
      const TopkRun& run = runs[low];
      const int64_t at = (unit - run.first_unit) * kUnitKeys;
      const int64_t unit_end = at + kUnitKeys < run.keys ? at + kUnitKeys : run.keys;
      uint32_t* rows = orders + (run.first - t0) * stride;
#if GLM5_LEVEL >= 4
      if constexpr (std::is_same_v<Cache, PlainKeys<bf16>>) {
        score_bf16_unit(a, cache, run, at, unit_end, rows, stride);
        continue;
      }
#endif
      score_unit<T>(a, cache, run, at, unit_end, rows, stride);
    }
  });
  parallel_for(t1 - t0, rows_per_range(a.longest), [&](int64_t begin, int64_t end) {
    Scratch scratch;
    uint32_t* histogram = scratch.take<uint32_t>(kSelectBuckets);
    uint32_t* few = scratch.take<uint32_t>(a.longest);
    for (int64_t t = t0 + begin; t < t0 + end; ++t) {
      const int64_t n = requests[t] < 0 ? 0 : kv_lens[t];
      const uint32_t* row = orders + (t - t0) * stride;
      int32_t* to = indices + t * a.topk;
      int64_t found = select_largest(row, n, a.topk, histogram, few, to);
      for (int64_t j = 0; scores && j < a.topk; ++j) {
        scores[t * a.topk + j] = j < found ? from_order(row[to[j]]) : -__builtin_inff();
      }
      for (; found < a.topk; ++found) to[found] = -1;
    }
  });
}

template <class T, class Cache>
void topk_typed(const TopkArguments& a, const Cache& cache) {
  // Memory for scores stays with the thread, so it is kept below what the caller allows: enough for the threads.
  constexpr int64_t kEnough = int64_t{1} << 23;
  const int64_t tokens = a.iq.dim(0), stride = (a.longest + kIndexPanel - 1) / kIndexPanel * kIndexPanel;
  const int64_t bytes = a.workspace_bytes < kEnough ? a.workspace_bytes : kEnough;
  int64_t block = bytes / 4 / (stride + 1);
  block = block < 1 ? 1 : block > tokens ? tokens : block;
  Scratch scratch;
  uint32_t* orders = scratch.take<uint32_t>(block * stride);
  TopkRun* runs = scratch.take<TopkRun>(block);
  for (int64_t t = 0; t < tokens; t += block) {
    select_tokens<T>(a, cache, t, t + block < tokens ? t + block : tokens, orders, stride, runs);
  }
}

inline void select_topk(const char* op, const char* what, const TensorView& iq, const TensorView& iw,
                        const TensorView& index_cache, const TensorView& block_table, const TensorView& request_ids,
                        const TensorView& kv_lens, int64_t topk, int64_t max_kv_len, const char* format,
                        int64_t workspace_bytes, const TensorView& indices, const TensorView* scores) {
  const bool bytes = is_byte_format(op, format, "fp8");
  const int64_t dim = iq.dim(2), size = bytes ? index_cache.dim(1) / (dim + 4) : index_cache.dim(1);
  const PageTable table(block_table, index_cache.dim(0), size);
  const int64_t longest = check_lengths(op, table, request_ids, kv_lens, max_kv_len);
  const TopkArguments a{iq, iw, request_ids, kv_lens, table, topk, longest, workspace_bytes, indices, scores};
  for_float_type(what, iq.dtype(), [&](auto type) {
    using T = decltype(type);
    if (bytes) {
      topk_typed<T>(a, Fp8Keys{index_cache.data<uint8_t>(), dim, size});
    } else {
      topk_typed<T>(a, PlainKeys<T>{index_cache.data<T>(), dim});
    }
  });
}

}  // namespace glm5::GLM5_LEVEL_NS
