// Attention by bf16 matrix products. Sixty-four keys lie in shared memory at a time; the halves of the next block are
// fetched as soon as the values of this one's are done with.
#pragma once

#include "cuda/attention/load.cuh"
#include "cuda/dev/mma_sm80.h"

namespace glm5::cuda {

// Rows of an odd number of 16 bytes: eight rows of a column meet eight different banks.
GLM5_BOTH constexpr int bf16_stride(const AttentionShape& shape) {
  return shape.wide_row() + 8;
}
GLM5_BOTH constexpr dev::u32 bf16_attention_shared(const AttentionShape& shape) {
  return dev::SharedBytes{}
      .array<dev::bf16>(kTileHeads * bf16_stride(shape))
      .array<dev::bf16>(kKeyBlock * bf16_stride(shape))
      .array<float>(kTileHeads * kScoreStride)
      .array<float>(kKeyBlock * kMostGroups)
      .array<dev::i64>(kKeyBlock)
      .array<float>(kTileHeads)
      .array<float>(kTileHeads)
      .array<float>(kTileHeads)
      .used;
}

constexpr int kColumnTiles = 16;  // of 8 columns: a warp owns 128

struct Bf16Tiles {
  dev::Shared<dev::bf16> queries, keys;
  dev::Shared<float> scores, scales;
  dev::Shared<dev::i64> slots;
  dev::Shared<float> alpha, old, fresh;
};

// Scores of 16 heads and the 16 keys that this warp owns: k ascending over C, then R. Codes of byte rows are multiplied
// by their group's scale once the group is summed.
template <bool Bytes>
GLM5_DEVICE void score_keys_bf16(const AttentionShape& shape, const Bf16Tiles& at) {
  const int lane = dev::lane_index(), stride = bf16_stride(shape), first = dev::warp_index() * 16;
  const int g = lane >> 2, t = lane & 3;
  const auto a_row = at.queries + ((lane & 15) * stride + (lane >> 4) * 8);
  const auto b_row = at.keys + ((first + (lane & 7) + (lane >> 4) * 8) * stride + (lane >> 3 & 1) * 8);
  float sum[2][4] = {}, part[2][4] = {};
  const int width = shape.wide_row();
  for (int k = 0; k < width; k += 16) {
    dev::u32 a[4], b[4];
    dev::ldmatrix_x4(a, a_row + k);
    dev::ldmatrix_x4(b, b_row + k);
    if (Bytes) {
      dev::mma_bf16(part[0], a, b);
      dev::mma_bf16(part[1], a, b + 2);
      const bool latent = k < shape.wide_latent();
      if (k + 16 == width || k + 16 == shape.wide_latent() || (latent && (k + 16) % kGroup == 0)) {
        GLM5_UNROLL
        for (int n = 0; n < 2; ++n) {
          GLM5_UNROLL
          for (int i = 0; i < 4; ++i) {
            const int key = first + n * 8 + 2 * t + (i & 1);
            const float scale = latent ? static_cast<float>(at.scales[key * kMostGroups + k / kGroup]) : 1.0f;
            sum[n][i] = dev::fused(part[n][i], scale, sum[n][i]);
            part[n][i] = 0.0f;
          }
        }
      }
    } else {
      dev::mma_bf16(sum[0], a, b);
      dev::mma_bf16(sum[1], a, b + 2);
    }
  }
  GLM5_UNROLL
  for (int n = 0; n < 2; ++n) {
    GLM5_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int key = first + n * 8 + 2 * t + (i & 1), head = g + (i >> 1) * 8;
      at.scores[head * kScoreStride + key] = at.slots[key] >= 0 ? sum[n][i] * shape.scale : -dev::infinity();
    }
  }
}

// Adds 32 keys' p * v to the 128 columns that this warp owns. p is rounded to bf16 here and nowhere else.
template <bool Bytes>
GLM5_DEVICE void add_values_bf16(const AttentionShape& shape, const Bf16Tiles& at, int first,
                                 float (&acc)[kColumnTiles][4]) {
  const int lane = dev::lane_index(), warp = dev::warp_index(), stride = bf16_stride(shape);
  const int g = lane >> 2, t = lane & 3;
  GLM5_UNROLL
  for (int k = first; k < first + 32; k += 16) {
    dev::u32 a[4];
    GLM5_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int key = k + 2 * t + (i >> 1) * 8, head = g + (i & 1) * 8;
      float low = at.scores[head * kScoreStride + key], high = at.scores[head * kScoreStride + key + 1];
      if (Bytes && warp < shape.groups()) {
        low *= at.scales[key * kMostGroups + warp];
        high *= at.scales[(key + 1) * kMostGroups + warp];
      }
      a[i] = dev::pack(dev::narrow<dev::bf16>(low), dev::narrow<dev::bf16>(high));
    }
    const auto v_row = at.keys + ((k + (lane & 15)) * stride + warp * 128 + (lane >> 4) * 8);
    GLM5_UNROLL
    for (int n = 0; n < kColumnTiles; n += 2) {
      if (warp * 128 + n * 8 >= shape.wide_latent()) break;
      dev::u32 b[4];
      dev::ldmatrix_x4_trans(b, v_row + n * 8);
      dev::mma_bf16(acc[n], a, b);
      dev::mma_bf16(acc[n + 1], a, b + 2);
    }
  }
}

template <class Cache>
GLM5_DEVICE void fetch_keys_bf16(const AttentionShape& shape, const Cache& cache, const Bf16Tiles& at, int first,
                                 int count) {
  const auto tile = at.keys + first * bf16_stride(shape);
  if constexpr (Cache::kBytes) {
    decode_keys(shape, cache, at.slots, first, count, tile, bf16_stride(shape), at.scales);
  } else {
    copy_keys(shape, cache, at.slots, first, count, tile, bf16_stride(shape));
  }
}

// Grid: tokens, tiles of heads, splits (or one that walks).
template <class Cache>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_bf16_kernel(AttentionShape shape, AttentionPointers at, const dev::bf16* q, Cache cache, dev::bf16* out) {
  GLM5_SHARED_MEMORY(memory);
  Bf16Tiles tiles;
  tiles.queries = memory.array<dev::bf16>(kTileHeads * bf16_stride(shape));
  tiles.keys = memory.array<dev::bf16>(kKeyBlock * bf16_stride(shape));
  tiles.scores = memory.array<float>(kTileHeads * kScoreStride);
  tiles.scales = memory.array<float>(kKeyBlock * kMostGroups);
  tiles.slots = memory.array<dev::i64>(kKeyBlock);
  tiles.alpha = memory.array<float>(kTileHeads);
  tiles.old = memory.array<float>(kTileHeads);
  tiles.fresh = memory.array<float>(kTileHeads);
  const Place place(shape, at);
  const int g = dev::lane_index() >> 2, t = dev::lane_index() & 3, columns = dev::warp_index() * 128;

  clear_padding(shape, tiles.queries, bf16_stride(shape), kTileHeads);
  clear_padding(shape, tiles.keys, bf16_stride(shape), kKeyBlock);
  copy_queries(shape, place, q, tiles.queries, bf16_stride(shape));
  dev::cp_async_commit();

  float total[kColumnTiles][4] = {};
  RowState rows, all;
  all.clear();
  const int last = end_split(shape);
  for (int split = first_split(); split < last; ++split) {
    const int begin = split * kSplitKeys, end = begin + kSplitKeys;
    if (!has_entry(shape, place, begin)) break;
    float acc[kColumnTiles][4] = {};
    rows.clear();
    find_slots(shape, at, place, begin, tiles.slots);
    dev::sync_threads();
    fetch_keys_bf16(shape, cache, tiles, 0, kKeyBlock);
    dev::cp_async_commit();
    for (int first = begin;;) {
      dev::cp_async_wait<0>();
      dev::sync_threads();
      score_keys_bf16<Cache::kBytes>(shape, tiles);
      dev::sync_threads();
      softmax_block(tiles.scores, tiles.alpha, rows);
      const int next = first + kKeyBlock;
      const bool more = next < end && has_entry(shape, place, next);
      if (more) find_slots(shape, at, place, next, tiles.slots);
      dev::sync_threads();
      const float low = tiles.alpha[g], high = tiles.alpha[g + 8];
      GLM5_UNROLL
      for (int n = 0; n < kColumnTiles; ++n) {
        acc[n][0] *= low;
        acc[n][1] *= low;
        acc[n][2] *= high;
        acc[n][3] *= high;
      }
      add_values_bf16<Cache::kBytes>(shape, tiles, 0, acc);
      dev::sync_threads();
      if (more) fetch_keys_bf16(shape, cache, tiles, 0, 32);
      dev::cp_async_commit();
      add_values_bf16<Cache::kBytes>(shape, tiles, 32, acc);
      dev::sync_threads();
      if (!more) break;
      fetch_keys_bf16(shape, cache, tiles, 32, 32);
      dev::cp_async_commit();
      first = next;
    }
    merge_rows(rows, all, tiles.old, tiles.fresh);
    dev::sync_threads();
    GLM5_UNROLL
    for (int n = 0; n < kColumnTiles; ++n) {
      GLM5_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int head = g + (i >> 1) * 8;
        total[n][i] = merged(acc[n][i], total[n][i], tiles.old[head], tiles.fresh[head]);
      }
    }
  }
  dev::cp_async_wait<0>();
  publish_rows(shape, at, place, all, tiles.alpha);
  dev::sync_threads();
  GLM5_UNROLL
  for (int n = 0; n < kColumnTiles; ++n) {
    GLM5_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int head = g + (i >> 1) * 8;
      put_value(shape, at, place, out, head, columns + n * 8 + 2 * t + (i & 1), total[n][i], tiles.alpha[head]);
    }
  }
}

}  // namespace glm5::cuda
