// Attention of every token over its own keys of a paged latent cache, whatever chose the keys.
#pragma once

#include "cpu/kernel.h"
#include "cpu/rows/attention.h"
#include "cpu/rows/attention_bf16.h"
#include "cpu/rows/cache.h"
#include "glm5/paged.h"

namespace glm5::GLM5_LEVEL_NS {

GLM5_INLINE void prefetch_bytes(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

// row(slot, buffer): the row as f32, in place where it is stored so, else in the buffer.
template <class T>
struct PlainKv {
  const T* rows;
  int64_t width;
  GLM5_INLINE void prefetch(int64_t slot) const { prefetch_bytes(rows + slot * width, width * sizeof(T)); }
  GLM5_INLINE const float* row(int64_t slot, float* buffer) const {
    if constexpr (sizeof(T) == 4) {
      return rows + slot * width;
    } else {
      widen_row(rows + slot * width, width, buffer);
      return buffer;
    }
  }
};
struct Fp8Kv {
  const uint8_t* rows;
  int64_t latent, rope;
  GLM5_INLINE void prefetch(int64_t slot) const {
    prefetch_bytes(rows + slot * fp8_kv_row_bytes(latent, rope), fp8_kv_row_bytes(latent, rope));
  }
  GLM5_INLINE const float* row(int64_t slot, float* buffer) const {
    read_fp8_kv_row(rows + slot * fp8_kv_row_bytes(latent, rope), latent, rope, buffer);
    return buffer;
  }
};

// A token's keys in the order they are attended to. `shared`: all heads have the same.
//   count(t, h) keys; position(t, h, j): the logical position of the j-th, ascending.
struct AllKeys {
  static constexpr bool shared = true;
  const int32_t* kv_lens;
  GLM5_INLINE int64_t count(int64_t t, int64_t) const { return kv_lens[t]; }
  GLM5_INLINE int64_t position(int64_t, int64_t, int64_t j) const { return j; }
};
template <bool Shared>
struct SelectedKeys {
  static constexpr bool shared = Shared;
  const int32_t* indices;
  int64_t heads, k;
  GLM5_INLINE const int32_t* list(int64_t t, int64_t h) const { return indices + (Shared ? t : t * heads + h) * k; }
  GLM5_INLINE int64_t count(int64_t t, int64_t h) const {
    const int32_t* row = list(t, h);
    int64_t n = 0;
    while (n < k && row[n] >= 0) ++n;
    return n;
  }
  GLM5_INLINE int64_t position(int64_t t, int64_t h, int64_t j) const { return list(t, h)[j]; }
};

struct AttentionArguments {
  const TensorView &q, &kv_cache, &request_ids;
  const PageTable& table;
  float scale;
  int64_t v_dim;
  bool bytes;         // whether the cache is fp8_ds_mla
  int64_t most_keys;  // no token has more
  const TensorView &out, &lse;
};

template <class T, class Cache, class Keys>
void attend_tokens(const AttentionArguments& a, const Cache& cache, const Keys& keys) {
  const int64_t tokens = a.q.dim(0), heads = a.q.dim(1), row = a.q.dim(2), values = a.v_dim;
  const T* q = a.q.data<T>();
  const int32_t* requests = a.request_ids.data<int32_t>();
  T* out = a.out.out<T>();
  float* lse = a.lse.out<float>();
  if (tokens == 0 || heads == 0) return;
  // Heads that share keys go together as far as the threads allow and their state fits the second-level cache.
  constexpr int64_t kMostHeads = 32, kFewestHeads = 8;
  int64_t together = heads < kMostHeads ? heads : kMostHeads;
  const int64_t wanted = (2 * get_num_threads() + tokens - 1) / tokens;
  if (heads < together * wanted) together = (heads + wanted - 1) / wanted;
  if (together < kFewestHeads) together = heads < kFewestHeads ? heads : kFewestHeads;
  if (!Keys::shared) together = 1;
  const int64_t parts = (heads + together - 1) / together;
  const int64_t work = together * (a.most_keys + 1) * (row + values + 1);
  parallel_for(tokens * parts, (int64_t{1} << 16) / work + 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    HeadGroup group(scratch, together, row, values, a.scale);
    const int64_t stride = padded_row(row);
    float* buffer = scratch.take<float>(kKeyBlock * stride);
    const float* block[kKeyBlock];
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t t = unit / parts, h = unit % parts * together, first = t * heads + h;
      const int64_t here = heads - h < together ? heads - h : together;
      const int64_t count = requests[t] < 0 ? 0 : keys.count(t, h);
      if (count == 0) {
        finish_empty_heads(here, values, out + first * values, lse + first);
        continue;
      }
      begin_heads(group, q + first * row, here);
      for (int64_t k = 0; k < count; k += kKeyBlock) {
        const int n = static_cast<int>(count - k < kKeyBlock ? count - k : kKeyBlock);
        for (int j = 0; j < n; ++j) {
          block[j] = cache.row(a.table.slot(requests[t], keys.position(t, h, k + j)), buffer + j * stride);
        }
        // Selected rows lie scattered: the next block's arrive while this one is computed.
        for (int64_t j = k + n; j < count && j < k + n + kKeyBlock; ++j) {
          cache.prefetch(a.table.slot(requests[t], keys.position(t, h, j)));
        }
        attend_block(group, block, n);
      }
      finish_heads(group, out + first * values, lse + first);
    }
  });
}

#if GLM5_LEVEL >= 4
// Plain bf16 caches: as attend_tokens, by bf16 products.
template <class Keys>
void attend_bf16_tokens(const AttentionArguments& a, const PlainKv<bf16>& cache, const Keys& keys) {
  const int64_t tokens = a.q.dim(0), heads = a.q.dim(1), row = a.q.dim(2), values = a.v_dim;
  const bf16* q = a.q.data<bf16>();
  const int32_t* requests = a.request_ids.data<int32_t>();
  bf16* out = a.out.out<bf16>();
  float* lse = a.lse.out<float>();
  if (tokens == 0 || heads == 0) return;
  // Laying keys out is paid for by the heads that share them: a token's heads part only to keep all threads busy.
  constexpr int64_t kMostHeads = 64, kWhole = 32;
  const int64_t wanted = (get_num_threads() + tokens - 1) / tokens;
  int64_t together = ((heads + wanted - 1) / wanted + kWhole - 1) / kWhole * kWhole;
  if (together > kMostHeads) together = kMostHeads;
  if (together > heads) together = heads;
  if (!Keys::shared) together = 1;
  const int64_t parts = (heads + together - 1) / together;
  const int64_t work = together * (a.most_keys + 1) * (row + values + 1);
  parallel_for(tokens * parts, (int64_t{1} << 18) / work + 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    Bf16Heads group(scratch, together, row, values, a.scale);
#if GLM5_LEVEL >= 5
    Tiles tiles(16);
#endif
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t t = unit / parts, h = unit % parts * together, first = t * heads + h;
      const int64_t here = heads - h < together ? heads - h : together;
      const int64_t count = requests[t] < 0 ? 0 : keys.count(t, h);
      if (count == 0) {
        finish_empty_heads(here, values, out + first * values, lse + first);
        continue;
      }
      begin_bf16_heads(group, q + first * row, here);
      auto find = [&](int64_t k, RowsAhead& rows) {
        for (int64_t j = k; j < count && j < k + kBlockKeys; ++j) {
          rows.row[rows.count++] = cache.rows + a.table.slot(requests[t], keys.position(t, h, j)) * row;
        }
      };
      RowsAhead now{{}, 0, 0};
      find(0, now);
      for (int64_t k = 0; k < count; k += kBlockKeys) {
        const int n = static_cast<int>(count - k < kBlockKeys ? count - k : kBlockKeys);
        // Selected rows lie scattered: those of the next block arrive while this one is computed.
        RowsAhead ahead{{}, 0, row * static_cast<int64_t>(sizeof(bf16))};
        find(k + n, ahead);
        attend_bf16_block(group, now.row, n, k == 0, ahead);
        now = ahead;
      }
      finish_bf16_heads(group, out + first * values, lse + first);
    }
  });
}
#endif

template <class Keys>
void latent_attention(const char* what, const AttentionArguments& a, const Keys& keys) {
  for_float_type(what, a.q.dtype(), [&](auto type) {
    using T = decltype(type);
    const int64_t row = a.q.dim(2);
    if (a.bytes) {
      attend_tokens<T>(a, Fp8Kv{a.kv_cache.data<uint8_t>(), a.v_dim, row - a.v_dim}, keys);
    } else {
#if GLM5_LEVEL >= 4
      if constexpr (std::is_same_v<T, bf16>) return attend_bf16_tokens(a, PlainKv<T>{a.kv_cache.data<T>(), row}, keys);
#endif
      attend_tokens<T>(a, PlainKv<T>{a.kv_cache.data<T>(), row}, keys);
    }
  });
}

}  // namespace glm5::GLM5_LEVEL_NS
