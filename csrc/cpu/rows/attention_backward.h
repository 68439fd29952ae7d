// Gradients of attention over a paged latent cache, whatever chose the keys.
//
// With p the softmax and d = grad_out . value:  ds = p * (d - sum p * d + grad_lse),  dq = scale * sum ds * key,
// dkey = sum over the rows that see it of scale * ds * q + p * grad_out. p is computed again from q and the keys.
// A row's p, ds and dq have an order of their own. A key adds its rows in ascending order, each row's heads summed
// first: whoever owns a piece of the cache walks all rows for it, so no thread count and no chunk shows in the bits.
#pragma once

#include "cpu/gemm_tile.h"
#include "cpu/kernel.h"
#include "cpu/vec_math.h"
#include "glm5/paged.h"

namespace glm5::GLM5_LEVEL_NS {

constexpr int64_t kCoefficientBytes = int64_t{8} << 20;  // of p and ds kept at a time: they stay in the last cache
constexpr int kSumRows = 4, kSumVectors = GLM5_LEVEL >= 2 ? 4 : 2;
constexpr int64_t kSumColumns = kSumVectors * kLanes, kSumKeys = 64;

// A number as a type.
template <int N>
struct Count {
  static constexpr int value = N;
};

struct AttentionGradients {
  const TensorView &grad_out, &grad_lse, &q, &kv_cache;
  float scale;
  int64_t v_dim;
  int64_t groups;     // selections a token has: its heads split into so many groups
  int64_t most_keys;  // no group has more
  const TensorView &grad_q, &grad_kv;
};

// sum[i][v] = sum over k < n, ascending, of weight[i][k * step] * row(k)[vector v].
template <int I, int V, class Row, class Lanes>
GLM5_INLINE void weighted_rows(const float* const* weight, int64_t step, int64_t n, Row&& row, Lanes lanes, f32v* sum) {
  for (int64_t k = 0; k < n; ++k) {
    const auto* from = row(k);
    f32v values[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) values[v] = load(from + v * kLanes, lanes);
#pragma GCC unroll 8
    for (int i = 0; i < I; ++i) {
      const f32v w = broadcast(weight[i][k * step]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[i * V + v] = fma(w, values[v], sum[i * V + v]);
    }
  }
}

// f(c, vectors, lanes) over columns [c0, c1): tiles of kSumVectors whole vectors, then single vectors and a tail.
template <class F>
GLM5_INLINE void for_column_tiles(int64_t c0, int64_t c1, F&& f) {
  for (; c0 + kSumColumns <= c1; c0 += kSumColumns) f(c0, Count<kSumVectors>{}, Full{});
  for_lanes(c1 - c0, [&](int64_t i, auto lanes) __attribute__((always_inline)) { f(c0 + i, Count<1>{}, lanes); });
}

// Scores of n keys become p in place, d becomes ds in place.
inline void softmax_backward_row(float* p, float* d, int64_t n, float scale, float grad_lse) {
  f32v most = broadcast(-__builtin_inff());
  for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    const f32v s = load(p + i, lanes) * broadcast(scale);
    store(p + i, s, lanes);
    most = max(most, fill_past(s, lanes, -__builtin_inff()));
  });
  const f32v m = broadcast(reduce_max(most));
  const float total = sum_row(n, [&](f32v chain, int64_t i, auto lanes) __attribute__((always_inline)) {
    const f32v e = exp(load(p + i, lanes) - m);
    store(p + i, e, lanes);
    return chain + fill_past(e, lanes, 0.0f);
  });
  const f32v divisor = broadcast(total);
  const float mean = sum_row(n, [&](f32v chain, int64_t i, auto lanes) __attribute__((always_inline)) {
    const f32v share = load(p + i, lanes) / divisor;
    store(p + i, share, lanes);
    return fma(share, load(d + i, lanes), chain);
  });
  const f32v shift = broadcast(mean - grad_lse);
  for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    store(d + i, load(p + i, lanes) * (load(d + i, lanes) - shift), lanes);
  });
}

// What is kept of a chunk's units: a unit is a token's group of heads.
struct UnitStore {
  int64_t heads, stride;  // of a group; of a head's row of p or ds
  int64_t* counts;        // [units] keys
  int64_t* slots;         // [units][most_keys] where they lie
  float *p, *ds;          // [units][heads][stride]
};

// p, ds and dq of one unit.
template <class T>
inline void differentiate_unit(const AttentionGradients& a, const UnitStore& kept, int64_t unit, int64_t at) {
  const int64_t row = a.q.dim(2), values = a.v_dim, heads = kept.heads, stride = kept.stride;
  const int64_t n = kept.counts[at], *slots = kept.slots + at * a.most_keys;
  const T *q = a.q.data<T>() + unit * heads * row, *grad_out = a.grad_out.data<T>() + unit * heads * values;
  const T* cache = a.kv_cache.data<T>();
  const float* grad_lse = a.grad_lse.data<float>() + unit * heads;
  float *p = kept.p + at * heads * stride, *ds = kept.ds + at * heads * stride;
  T* grad_q = a.grad_q.out<T>() + unit * heads * row;
  const auto key = [=](int64_t k) { return cache + slots[k] * row; };
  const auto keep_in = [=](float* to) {
    return [=](int64_t h, int64_t k, const float* from, int64_t count) {
      std::memcpy(to + h * stride + k, from, static_cast<size_t>(count) * sizeof(float));
    };
  };
  gemm_block([=](int64_t h) { return q + h * row; }, 0, heads, key, 0, n, row, keep_in(p));
  gemm_block([=](int64_t h) { return grad_out + h * values; }, 0, heads, key, 0, n, values, keep_in(ds));
  for (int64_t h = 0; h < heads && n > 0; ++h) {
    softmax_backward_row(p + h * stride, ds + h * stride, n, a.scale, grad_lse[h]);
  }
  // A block of keys stays in the first-level cache while all heads pass by; their sums wait in `sums`.
  Scratch scratch;
  float* sums = scratch.take<float>(heads * kSumColumns);
  for_column_tiles(0, row, [&](int64_t c, auto vectors, auto lanes) {
    constexpr int V = decltype(vectors)::value;
    std::memset(sums, 0, static_cast<size_t>(heads * kSumColumns) * sizeof(float));
    for (int64_t first = 0; first < n; first += kSumKeys) {
      const int64_t block = n - first < kSumKeys ? n - first : kSumKeys;
      const auto heads_from = [&](int64_t h, auto many) {
        constexpr int I = decltype(many)::value;
        const float* weight[I];
        f32v sum[I * V];
        for (int i = 0; i < I; ++i) {
          weight[i] = ds + (h + i) * stride + first;
          for (int v = 0; v < V; ++v) sum[i * V + v] = load(sums + (h + i) * kSumColumns + v * kLanes);
        }
        weighted_rows<I, V>(weight, 1, block, [&](int64_t k) { return key(first + k) + c; }, lanes, sum);
        for (int i = 0; i < I; ++i) {
          for (int v = 0; v < V; ++v) store(sums + (h + i) * kSumColumns + v * kLanes, sum[i * V + v]);
        }
      };
      int64_t h = 0;
      for (; h + kSumRows <= heads; h += kSumRows) heads_from(h, Count<kSumRows>{});
      for (; h < heads; ++h) heads_from(h, Count<1>{});
    }
    for (int64_t h = 0; h < heads; ++h) {
      for (int v = 0; v < V; ++v) {
        store(grad_q + h * row + c + v * kLanes, load(sums + h * kSumColumns + v * kLanes) * broadcast(a.scale), lanes);
      }
    }
  });
}

// Adds one unit's share to columns [c0, c1) of the keys listed by their place in its selection.
template <class T>
inline void add_to_keys(const AttentionGradients& a, const UnitStore& kept, int64_t unit, int64_t at,
                        const int32_t* places, int64_t n, int64_t c0, int64_t c1, float* total) {
  const int64_t row = a.q.dim(2), values = a.v_dim, heads = kept.heads, stride = kept.stride;
  const int64_t* slots = kept.slots + at * a.most_keys;
  const T *q = a.q.data<T>() + unit * heads * row, *grad_out = a.grad_out.data<T>() + unit * heads * values;
  const float *p = kept.p + at * heads * stride, *ds = kept.ds + at * heads * stride;
  const bool valued = c0 < values;  // the columns of a part are values, all or none
  for_column_tiles(c0, c1, [&](int64_t c, auto vectors, auto lanes) {
    constexpr int V = decltype(vectors)::value;
    const auto keys_from = [&](int64_t k, auto many) {
      constexpr int I = decltype(many)::value;
      const float* weight[I];
      f32v sum[I * V] = {};
      for (int i = 0; i < I; ++i) weight[i] = ds + places[k + i];
      weighted_rows<I, V>(weight, stride, heads, [&](int64_t h) { return q + h * row + c; }, lanes, sum);
#pragma GCC unroll 16
      for (int i = 0; i < I * V; ++i) sum[i] = sum[i] * broadcast(a.scale);
      if (valued) {
        for (int i = 0; i < I; ++i) weight[i] = p + places[k + i];
        weighted_rows<I, V>(weight, stride, heads, [&](int64_t h) { return grad_out + h * values + c; }, lanes, sum);
      }
#pragma GCC unroll 8
      for (int i = 0; i < I; ++i) {
        float* to = total + slots[places[k + i]] * row + c;
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          store(to + v * kLanes, load(to + v * kLanes, lanes) + sum[i * V + v], lanes);
        }
      }
    };
    int64_t k = 0;
    for (; k + kSumRows <= n; k += kSumRows) keys_from(k, Count<kSumRows>{});
    for (; k < n; ++k) keys_from(k, Count<1>{});
  });
}

// list(unit, slots): fills in where the unit's keys lie, in order, and returns how many they are; 0 for padding.
template <class T, class List>
void attention_backward(const AttentionGradients& a, List&& list) {
  const int64_t tokens = a.q.dim(0), row = a.q.dim(2), pool = a.kv_cache.dim(0) * a.kv_cache.dim(1);
  const int64_t units = tokens * a.groups, heads = units > 0 ? a.q.dim(1) / a.groups : 0, most = a.most_keys;
  const int64_t stride = padded_row(most), threads = get_num_threads();
  Scratch scratch;
  T* grad_kv = a.grad_kv.out<T>();
  float* total = nullptr;
  if constexpr (sizeof(T) == 4) {
    total = grad_kv;
  } else {
    total = scratch.take<float>(pool * row);
  }
  parallel_for(pool, rows_per_range(row), [=](int64_t begin, int64_t end) {
    std::memset(total + begin * row, 0, static_cast<size_t>((end - begin) * row) * sizeof(float));
  });

  int64_t chunk = kCoefficientBytes / (8 * (most + heads * stride) + 1) + 1;
  if (chunk < 2 * threads) chunk = 2 * threads;
  if (chunk > units) chunk = units;
  UnitStore kept{heads,
                 stride,
                 scratch.take<int64_t>(chunk),
                 scratch.take<int64_t>(chunk * most),
                 scratch.take<float>(chunk * heads * stride),
                 scratch.take<float>(chunk * heads * stride)};
  // Columns of values and of rope in parts of their own; keys are divided too where columns are too few.
  const int64_t value_parts = (a.v_dim + kSumColumns - 1) / kSumColumns;
  const int64_t parts = value_parts + (row - a.v_dim + kSumColumns - 1) / kSumColumns;
  int64_t owners = threads == 1 || parts == 0 ? 1 : (4 * threads + parts - 1) / parts;
  if (owners > pool) owners = pool;
  for (int64_t first = 0; first < units; first += chunk) {
    const int64_t count = units - first < chunk ? units - first : chunk;
    const int64_t work = heads * (most + 1) * (row + 1);
    parallel_for(count, (int64_t{1} << 16) / (work + 1) + 1, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) {
        kept.counts[at] = list(first + at, kept.slots + at * most);
        differentiate_unit<T>(a, kept, first + at, at);
      }
    });
    const int64_t part_work = count * heads * (most + 1) * kSumColumns / (owners > 0 ? owners : 1);
    parallel_for(parts * owners, (int64_t{1} << 16) / (part_work + 1) + 1, [&](int64_t begin, int64_t end) {
      Scratch own;
      int32_t* places = own.take<int32_t>(most);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t part = unit / owners, owner = unit % owners;
        const int64_t c0 = part < value_parts ? part * kSumColumns : a.v_dim + (part - value_parts) * kSumColumns;
        const int64_t limit = part < value_parts ? a.v_dim : row;
        const int64_t c1 = c0 + kSumColumns < limit ? c0 + kSumColumns : limit;
        const int64_t low = pool * owner / owners, high = pool * (owner + 1) / owners;
        for (int64_t at = 0; at < count; ++at) {
          const int64_t* slots = kept.slots + at * most;
          int64_t mine = 0;
          for (int64_t k = 0; k < kept.counts[at]; ++k) {
            places[mine] = static_cast<int32_t>(k);
            mine += slots[k] >= low && slots[k] < high;
          }
          add_to_keys<T>(a, kept, first + at, at, places, mine, c0, c1, total);
        }
      }
    });
  }
  if constexpr (sizeof(T) != 4) {
    parallel_for(pool, rows_per_range(row), [=](int64_t begin, int64_t end) {
      for_lanes((end - begin) * row, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
        store(grad_kv + begin * row + i, load(total + begin * row + i, lanes), lanes);
      });
    });
  }
}

}  // namespace glm5::GLM5_LEVEL_NS
