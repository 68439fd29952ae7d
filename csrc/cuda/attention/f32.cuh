// Attention in f32: every product and sum an fma, in the order of the bf16 form. Sixteen keys lie in shared memory at a
// time and are fetched twice, for the scores and for the values.
#pragma once

#include "cuda/attention/load.cuh"

namespace glm5::cuda {

constexpr int kFloatKeys = 16;

GLM5_BOTH constexpr int f32_stride(const AttentionShape& shape) {
  return shape.wide_row() + 4;
}
GLM5_BOTH constexpr dev::u32 f32_attention_shared(const AttentionShape& shape) {
  return dev::SharedBytes{}
      .array<float>(kTileHeads * f32_stride(shape))
      .array<float>(kFloatKeys * f32_stride(shape))
      .array<float>(kTileHeads * kScoreStride)
      .array<dev::i64>(kKeyBlock)
      .array<float>(kTileHeads)
      .array<float>(kTileHeads)
      .array<float>(kTileHeads)
      .used;
}

struct alignas(16) Four {
  float x[4];
};

// A thread has one head and two of the keys: a chain each.
GLM5_DEVICE void score_keys_f32(const AttentionShape& shape, dev::Shared<float> queries, dev::Shared<float> keys,
                                dev::Shared<dev::i64> slots, int first, dev::Shared<float> scores) {
  const int head = dev::thread_index() >> 3, key = dev::thread_index() & 7, stride = f32_stride(shape);
  float low = 0.0f, high = 0.0f;
  for (int k = 0; k < shape.wide_row(); k += 4) {
    const Four q = dev::load_wide<Four>(queries + (head * stride + k));
    const Four a = dev::load_wide<Four>(keys + (key * stride + k));
    const Four b = dev::load_wide<Four>(keys + ((key + 8) * stride + k));
    GLM5_UNROLL
    for (int i = 0; i < 4; ++i) {
      low = dev::fused(q.x[i], a.x[i], low);
      high = dev::fused(q.x[i], b.x[i], high);
    }
  }
  const auto row = scores + (head * kScoreStride + first);
  row[key] = slots[first + key] >= 0 ? low * shape.scale : -dev::infinity();
  row[key + 8] = slots[first + key + 8] >= 0 ? high * shape.scale : -dev::infinity();
}

// A thread has four columns of all heads.
GLM5_DEVICE void add_values_f32(const AttentionShape& shape, dev::Shared<float> keys, int first,
                                dev::Shared<float> scores, float (&acc)[kTileHeads][4]) {
  const int column = dev::thread_index() * 4;
  if (column >= shape.wide_latent()) return;
  for (int key = 0; key < kFloatKeys; ++key) {
    const Four v = dev::load_wide<Four>(keys + (key * f32_stride(shape) + column));
    GLM5_UNROLL
    for (int head = 0; head < kTileHeads; ++head) {
      const float p = scores[head * kScoreStride + first + key];
      GLM5_UNROLL
      for (int i = 0; i < 4; ++i) acc[head][i] = dev::fused(p, v.x[i], acc[head][i]);
    }
  }
}

template <class Cache>
GLM5_DEVICE void fetch_keys_f32(const AttentionShape& shape, const Cache& cache, dev::Shared<dev::i64> slots, int first,
                                dev::Shared<float> keys) {
  if constexpr (Cache::kBytes) {
    decode_keys(shape, cache, slots, first, kFloatKeys, keys, f32_stride(shape), keys);
  } else {
    copy_keys(shape, cache, slots, first, kFloatKeys, keys, f32_stride(shape));
  }
  dev::cp_async_commit();
  dev::cp_async_wait<0>();
}

// Grid: tokens, tiles of heads, splits (or one that walks).
template <class Cache>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_f32_kernel(AttentionShape shape, AttentionPointers at, const float* q, Cache cache, float* out) {
  GLM5_SHARED_MEMORY(memory);
  const auto queries = memory.array<float>(kTileHeads * f32_stride(shape));
  const auto keys = memory.array<float>(kFloatKeys * f32_stride(shape));
  const auto scores = memory.array<float>(kTileHeads * kScoreStride);
  const auto slots = memory.array<dev::i64>(kKeyBlock);
  const auto alpha = memory.array<float>(kTileHeads);
  const auto old = memory.array<float>(kTileHeads);
  const auto fresh = memory.array<float>(kTileHeads);
  const Place place(shape, at);

  clear_padding(shape, queries, f32_stride(shape), kTileHeads);
  clear_padding(shape, keys, f32_stride(shape), kFloatKeys);
  copy_queries(shape, place, q, queries, f32_stride(shape));
  dev::cp_async_commit();
  dev::cp_async_wait<0>();

  float total[kTileHeads][4] = {};
  RowState rows, all;
  all.clear();
  const int last = end_split(shape);
  for (int split = first_split(); split < last; ++split) {
    const int begin = split * kSplitKeys;
    if (!has_entry(shape, place, begin)) break;
    float acc[kTileHeads][4] = {};
    rows.clear();
    for (int first = begin; first < begin + kSplitKeys && has_entry(shape, place, first); first += kKeyBlock) {
      find_slots(shape, at, place, first, slots);
      dev::sync_threads();
      for (int k = 0; k < kKeyBlock; k += kFloatKeys) {
        fetch_keys_f32(shape, cache, slots, k, keys);
        dev::sync_threads();
        score_keys_f32(shape, queries, keys, slots, k, scores);
        dev::sync_threads();
      }
      softmax_block(scores, alpha, rows);
      dev::sync_threads();
      GLM5_UNROLL
      for (int head = 0; head < kTileHeads; ++head) {
        const float factor = alpha[head];
        GLM5_UNROLL
        for (int i = 0; i < 4; ++i) acc[head][i] *= factor;
      }
      for (int k = 0; k < kKeyBlock; k += kFloatKeys) {
        fetch_keys_f32(shape, cache, slots, k, keys);
        dev::sync_threads();
        add_values_f32(shape, keys, k, scores, acc);
        dev::sync_threads();
      }
    }
    merge_rows(rows, all, old, fresh);
    dev::sync_threads();
    GLM5_UNROLL
    for (int head = 0; head < kTileHeads; ++head) {
      const float keep = old[head], add = fresh[head];
      GLM5_UNROLL
      for (int i = 0; i < 4; ++i) total[head][i] = merged(acc[head][i], total[head][i], keep, add);
    }
  }
  publish_rows(shape, at, place, all, alpha);
  dev::sync_threads();
  GLM5_UNROLL
  for (int head = 0; head < kTileHeads; ++head) {
    const float sum = alpha[head];
    GLM5_UNROLL
    for (int i = 0; i < 4; ++i)
      put_value(shape, at, place, out, head, dev::thread_index() * 4 + i, total[head][i], sum);
  }
}

}  // namespace glm5::cuda
