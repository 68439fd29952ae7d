// What every form of the attention kernels shares: sizes, where a key lies, the softmax of a block of 64 keys, and how
// splits of 512 selected keys are merged.
//
// A block of threads serves 16 heads of one token, or one head where every head has a selection of its own. Splits are
// cut from the token's own list, each begins afresh, and they are merged in ascending order, whether one block walks
// over all of them or each has its own: the bits are the same.
#pragma once

#include "cuda/dev/smem.h"
#include "cuda/dev/sync.h"

namespace glm5::cuda {

constexpr int kTileHeads = 16, kKeyBlock = 64, kSplitKeys = 512, kAttentionThreads = 128;
constexpr int kMostLatent = 512, kMostRope = 64, kGroup = 128, kMostGroups = kMostLatent / kGroup;
constexpr int kScoreStride = kKeyBlock + 4;
constexpr int kRowsPerWarp = kTileHeads / (kAttentionThreads / 32);

struct AttentionShape {
  int heads, latent, rope, keys;  // H, C, R, K
  int per_head;                   // 1 when every head has its own selection
  int requests, pages_each, pages, page_size;
  float scale;

  GLM5_BOTH constexpr int row() const { return latent + rope; }
  // Parts of a row in shared memory are padded to the depth of a matrix product.
  GLM5_BOTH constexpr int wide_latent() const { return dev::round_up(latent, 16); }
  GLM5_BOTH constexpr int wide_rope() const { return dev::round_up(rope, 16); }
  GLM5_BOTH constexpr int wide_row() const { return wide_latent() + wide_rope(); }
  GLM5_BOTH constexpr int groups() const { return dev::divide_up(latent, kGroup); }
  GLM5_BOTH constexpr int byte_row() const { return latent + 4 * groups() + 2 * rope; }
  GLM5_BOTH constexpr int splits() const { return dev::divide_up(keys, kSplitKeys); }
  GLM5_BOTH constexpr int heads_each() const { return per_head ? 1 : kTileHeads; }
};

struct AttentionPointers {
  const int *block_table, *request_ids, *indices;
  float* lse;
  float* partial;  // [T, H, splits, 2 + C]: largest score, sum of p, sum of p * v; null when blocks walk
};

// This block's token, heads and selection.
struct Place {
  int token, head, heads, request;
  const int* selection;

  GLM5_DEVICE Place(const AttentionShape& shape, const AttentionPointers& at) {
    token = dev::block_x();
    head = dev::block_y() * shape.heads_each();
    heads = dev::least(shape.heads - head, shape.heads_each());
    request = at.request_ids[token];
    const dev::i64 list = shape.per_head ? static_cast<dev::i64>(token) * shape.heads + head : token;
    selection = at.indices + list * shape.keys;
  }
};

// The physical row of a logical position; -1 for one that is absent or lies nowhere.
GLM5_DEVICE dev::i64 slot_of(const AttentionShape& shape, const int* block_table, int request, int position) {
  if (position < 0 || request < 0 || request >= shape.requests) return -1;
  const int logical = position / shape.page_size;
  if (logical >= shape.pages_each) return -1;
  const int page = block_table[static_cast<dev::i64>(request) * shape.pages_each + logical];
  if (page < 0 || page >= shape.pages) return -1;
  return static_cast<dev::i64>(page) * shape.page_size + (position - logical * shape.page_size);
}

// Slots of the 64 keys that begin at entry `first` of the list.
GLM5_DEVICE void find_slots(const AttentionShape& shape, const AttentionPointers& at, const Place& place, int first,
                            dev::Shared<dev::i64> slots) {
  const int j = dev::thread_index();
  if (j >= kKeyBlock) return;
  const int entry = first + j;
  slots[j] = slot_of(shape, at.block_table, place.request, entry < shape.keys ? place.selection[entry] : -1);
}

// Whether the list has an entry there: they end with the first -1.
GLM5_DEVICE bool has_entry(const AttentionShape& shape, const Place& place, int entry) {
  return place.request >= 0 && entry < shape.keys && place.selection[entry] >= 0;
}

// Softmax state of the rows that a warp owns, the same in all of its lanes.
struct RowState {
  float most[kRowsPerWarp], sum[kRowsPerWarp];
  GLM5_DEVICE void clear() {
    GLM5_UNROLL
    for (int i = 0; i < kRowsPerWarp; ++i) {
      most[i] = -dev::infinity();
      sum[i] = 0.0f;
    }
  }
};

// Scores of a block become p = exp(score - largest so far); alpha is the factor from the old largest to the new.
GLM5_DEVICE void softmax_block(dev::Shared<float> scores, dev::Shared<float> alpha, RowState& state) {
  const int lane = dev::lane_index();
  GLM5_UNROLL
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int row = dev::warp_index() * kRowsPerWarp + i;
    const float low = scores[row * kScoreStride + lane], high = scores[row * kScoreStride + lane + 32];
    const float most = dev::larger(state.most[i], dev::warp_max(dev::larger(low, high)));
    const bool nothing = most == -dev::infinity();
    const float p = nothing ? 0.0f : dev::exponential(low - most), q = nothing ? 0.0f : dev::exponential(high - most);
    const float factor = nothing ? 1.0f : dev::exponential(state.most[i] - most);
    scores[row * kScoreStride + lane] = p;
    scores[row * kScoreStride + lane + 32] = q;
    state.sum[i] = state.sum[i] * factor + dev::warp_sum(p + q);
    state.most[i] = most;
    if (lane == 0) alpha[row] = factor;
  }
}

struct MergeFactors {
  float old, fresh;
};
// Merges a split (m, l) into what was merged before; sums of p * v follow by merged().
GLM5_DEVICE MergeFactors merge_split(float m, float l, float& most, float& sum) {
  if (m == -dev::infinity()) return MergeFactors{1.0f, 0.0f};
  const float top = dev::larger(most, m);
  const MergeFactors f{dev::exponential(most - top), dev::exponential(m - top)};
  sum = dev::fused(l, f.fresh, sum * f.old);
  most = top;
  return f;
}
GLM5_DEVICE float merged(float value, float total, float old, float fresh) {
  return dev::fused(value, fresh, total * old);
}

// The rows a warp owns: their split goes into `total`; the factors are left for all warps.
GLM5_DEVICE void merge_rows(const RowState& split, RowState& total, dev::Shared<float> old, dev::Shared<float> fresh) {
  GLM5_UNROLL
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const MergeFactors f = merge_split(split.most[i], split.sum[i], total.most[i], total.sum[i]);
    if (dev::lane_index() != 0) continue;
    old[dev::warp_index() * kRowsPerWarp + i] = f.old;
    fresh[dev::warp_index() * kRowsPerWarp + i] = f.fresh;
  }
}

// out = sum of p * v / sum of p, the division last; 0 where there is no key.
GLM5_DEVICE float finished(float value, float sum) {
  return sum > 0.0f || sum != sum ? value / sum : 0.0f;
}
GLM5_DEVICE float finished_lse(float most, float sum) {
  return sum > 0.0f || sum != sum ? most + dev::logarithm(sum) : -dev::infinity();
}

GLM5_DEVICE float* partial_of(const AttentionShape& shape, const AttentionPointers& at, int token, int head,
                              int split) {
  const dev::i64 row = (static_cast<dev::i64>(token) * shape.heads + head) * shape.splits() + split;
  return at.partial + row * (shape.latent + 2);
}

// Sums of rows for all warps: most[row], sum[row]; and to where they belong in memory.
GLM5_DEVICE void publish_rows(const AttentionShape& shape, const AttentionPointers& at, const Place& place,
                              const RowState& total, dev::Shared<float> sums) {
  GLM5_UNROLL
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int row = dev::warp_index() * kRowsPerWarp + i;
    if (dev::lane_index() != 0) continue;
    sums[row] = total.sum[i];
    if (row >= place.heads) continue;
    if (at.partial == nullptr) {
      at.lse[static_cast<dev::i64>(place.token) * shape.heads + place.head + row] =
          finished_lse(total.most[i], total.sum[i]);
    } else {
      float* to = partial_of(shape, at, place.token, place.head + row, dev::block_z());
      to[0] = total.most[i];
      to[1] = total.sum[i];
    }
  }
}

// One element of the result, or of this split's share of it.
template <class T>
GLM5_DEVICE void put_value(const AttentionShape& shape, const AttentionPointers& at, const Place& place, T* out,
                           int row, int column, float value, float sum) {
  if (row >= place.heads || column >= shape.latent) return;
  if (at.partial == nullptr) {
    const dev::i64 line = static_cast<dev::i64>(place.token) * shape.heads + place.head + row;
    out[line * shape.latent + column] = dev::narrow<T>(finished(value, sum));
  } else {
    partial_of(shape, at, place.token, place.head + row, dev::block_z())[2 + column] = value;
  }
}

// The splits this block walks over: all of them, or its own.
GLM5_DEVICE int first_split() {
  return dev::grid_z() == 1 ? 0 : dev::block_z();
}
GLM5_DEVICE int end_split(const AttentionShape& shape) {
  return dev::grid_z() == 1 ? shape.splits() : dev::block_z() + 1;
}

}  // namespace glm5::cuda
