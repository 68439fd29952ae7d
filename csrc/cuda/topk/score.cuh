// Scores of the lightning indexer for a tile of keys: sum over heads, ascending from +0, of iw * relu(iq . key).
#pragma once

#include "cuda/dev/mma_sm80.h"
#include "cuda/topk/best.cuh"

namespace glm5::cuda {

constexpr int kMostIndexHeads = 64, kMostIndexDim = 128, kHeadTile = 16;

struct IndexShape {
  int heads, dim, topk;  // Hi, Di, K
  int requests, pages_each, pages, page_size;

  GLM5_BOTH constexpr int wide_heads() const { return dev::round_up(heads, kHeadTile); }
  GLM5_BOTH constexpr int wide_dim() const { return dev::round_up(dim, 16); }
  GLM5_BOTH constexpr int page_bytes() const { return page_size * (dim + 4); }
};

// Page and offset of a logical position of a request; page -1 for one that lies nowhere.
struct KeyPlace {
  int page, offset;
};
GLM5_DEVICE KeyPlace place_of(const IndexShape& shape, const int* block_table, int request, int position) {
  const int logical = position / shape.page_size;
  if (logical >= shape.pages_each) return KeyPlace{-1, 0};
  const int page = block_table[static_cast<dev::i64>(request) * shape.pages_each + logical];
  return KeyPlace{page >= 0 && page < shape.pages ? page : -1, position - logical * shape.page_size};
}

// Index keys in the activation dtype, and `fp8`: a page holds the codes of all its keys, then a scale each.
template <class T>
struct PlainKeys {
  static constexpr bool kBytes = false;
  const T* rows;
};
struct ByteKeys {
  static constexpr bool kBytes = true;
  const dev::u8* pages;
};

GLM5_DEVICE float float_at(const dev::u8* p) {
  return dev::float_of(p[0] | static_cast<dev::u32>(p[1]) << 8 | static_cast<dev::u32>(p[2]) << 16 |
                       static_cast<dev::u32>(p[3]) << 24);
}

// Keys of a tile, by the arithmetic: 128 in bf16, 64 in f32.
template <class T>
GLM5_BOTH constexpr int tile_keys() {
  return sizeof(T) == 4 ? 64 : 128;
}
template <class T>
GLM5_BOTH constexpr int index_stride(const IndexShape& shape) {
  return shape.wide_dim() + 16 / static_cast<int>(sizeof(T));
}
constexpr int kProductStride = 128 + 4;

template <class T>
struct IndexTiles {
  dev::Shared<T> queries, keys;
  dev::Shared<float> weights, products, scales;

  GLM5_DEVICE IndexTiles(dev::SharedMemory& memory, const IndexShape& shape) {
    queries = memory.array<T>(shape.wide_heads() * index_stride<T>(shape));
    keys = memory.array<T>(tile_keys<T>() * index_stride<T>(shape));
    weights = memory.array<float>(shape.wide_heads());
    products = memory.array<float>(sizeof(T) == 4 ? 4 : kHeadTile * kProductStride);
    scales = memory.array<float>(tile_keys<T>());
  }
  GLM5_BOTH static constexpr dev::SharedBytes bytes(const IndexShape& shape) {
    return dev::SharedBytes{}
        .template array<T>(shape.wide_heads() * index_stride<T>(shape))
        .template array<T>(tile_keys<T>() * index_stride<T>(shape))
        .template array<float>(shape.wide_heads())
        .template array<float>(sizeof(T) == 4 ? 4 : kHeadTile * kProductStride)
        .template array<float>(tile_keys<T>());
  }
};

// One token's queries and weights; heads past the last are zeros, and so is what pads a row.
template <class T>
GLM5_DEVICE void load_queries(const IndexShape& shape, const T* iq, const float* iw, int token,
                              const IndexTiles<T>& tiles) {
  const T* mine = iq + static_cast<dev::i64>(token) * shape.heads * shape.dim;
  const int stride = index_stride<T>(shape);
  for (int i = dev::thread_index(); i < shape.wide_heads() * shape.wide_dim(); i += kTopkThreads) {
    const int head = i / shape.wide_dim(), d = i % shape.wide_dim();
    const bool real = head < shape.heads && d < shape.dim;
    tiles.queries[head * stride + d] = real ? mine[head * shape.dim + d] : dev::narrow<T>(0.0f);
  }
  for (int i = dev::thread_index(); i < shape.wide_heads(); i += kTopkThreads) {
    tiles.weights[i] = i < shape.heads ? iw[static_cast<dev::i64>(token) * shape.heads + i] : 0.0f;
  }
  const int pad = shape.wide_dim() - shape.dim;
  for (int i = dev::thread_index(); i < tile_keys<T>() * pad; i += kTopkThreads) {
    tiles.keys[i / pad * stride + shape.dim + i % pad] = dev::narrow<T>(0.0f);
  }
}

// Begins to fetch the keys at positions [first, end), at most a tile; to be committed and waited for.
template <class T>
GLM5_DEVICE void fetch_tile(const IndexShape& shape, const PlainKeys<T>& cache, const int* block_table, int request,
                            int first, int end, const IndexTiles<T>& tiles) {
  constexpr int kEach = 16 / sizeof(T);
  const int stride = index_stride<T>(shape);
  const bool wide = shape.dim % kEach == 0 && dev::aligned_16(cache.rows);
  const int step = wide ? kEach : 1, chunks = shape.dim / step;
  for (int i = dev::thread_index(); i < tile_keys<T>() * chunks; i += kTopkThreads) {
    const int key = i / chunks, d = i % chunks * step;
    const KeyPlace at = first + key < end ? place_of(shape, block_table, request, first + key) : KeyPlace{-1, 0};
    const T* from = cache.rows + (static_cast<dev::i64>(at.page) * shape.page_size + at.offset) * shape.dim + d;
    const bool there = at.page >= 0;
    if (wide) {
      dev::cp_async_16(tiles.keys + (key * stride + d), there ? from : cache.rows, there);
    } else {
      tiles.keys[key * stride + d] = there ? *from : dev::narrow<T>(0.0f);
    }
  }
}
// Byte keys: bf16 tiles hold bare codes, which are exact, and scales beside them; f32 tiles the products.
template <class T>
GLM5_DEVICE void fetch_tile(const IndexShape& shape, const ByteKeys& cache, const int* block_table, int request,
                            int first, int end, const IndexTiles<T>& tiles) {
  constexpr bool kScaled = sizeof(T) == 4;
  const int stride = index_stride<T>(shape);
  const bool wide = shape.dim % 4 == 0 && shape.page_bytes() % 4 == 0 && dev::aligned_16(cache.pages);
  const int step = wide ? 4 : 1, chunks = shape.dim / step;
  for (int i = dev::thread_index(); i < tile_keys<T>() * chunks; i += kTopkThreads) {
    const int key = i / chunks, d = i % chunks * step;
    const KeyPlace at = first + key < end ? place_of(shape, block_table, request, first + key) : KeyPlace{-1, 0};
    const dev::u8* page = cache.pages + static_cast<dev::i64>(at.page) * shape.page_bytes();
    const dev::u8* codes = page + static_cast<dev::i64>(at.offset) * shape.dim + d;
    const dev::u8* scale = page + static_cast<dev::i64>(shape.page_size) * shape.dim + 4 * at.offset;
    const bool there = at.page >= 0;
    const float factor = there && (kScaled || d == 0) ? float_at(scale) : 0.0f;
    if (!kScaled && d == 0) tiles.scales[key] = factor;
    dev::u32 word = 0;
    if (there) word = wide ? *reinterpret_cast<const dev::u32*>(codes) : *codes;
    for (int j = 0; j < step; ++j) {
      const float value = dev::float_of_e4m3(word >> (8 * j));
      tiles.keys[key * stride + d + j] = dev::narrow<T>(kScaled ? value * factor : value);
    }
  }
}

GLM5_DEVICE float add_head(float score, float weight, float product) {
  return dev::fused(weight, product < 0.0f ? 0.0f : product, score);  // a NaN stays one
}

// The score of the key that this thread owns. `after_use` runs once the tile's keys are read by all.
template <bool Bytes, class AfterUse>
GLM5_DEVICE float score_tile(const IndexShape& shape, const IndexTiles<dev::bf16>& tiles, const AfterUse& after_use) {
  const int lane = dev::lane_index(), warp = dev::warp_index(), g = lane >> 2, t = lane & 3;
  const int stride = index_stride<dev::bf16>(shape);
  const float scale = Bytes ? static_cast<float>(tiles.scales[dev::thread_index()]) : 1.0f;
  float score = 0.0f;
  for (int h = 0; h < shape.wide_heads(); h += kHeadTile) {
    float sum[4][4] = {};
    for (int k = 0; k < shape.wide_dim(); k += 16) {
      dev::u32 a[4];
      dev::ldmatrix_x4(a, tiles.queries + ((h + (lane & 15)) * stride + k + (lane >> 4) * 8));
      GLM5_UNROLL
      for (int n = 0; n < 4; n += 2) {
        dev::u32 b[4];
        const int key = warp * 32 + n * 8 + (lane & 7) + (lane >> 4) * 8;
        dev::ldmatrix_x4(b, tiles.keys + (key * stride + k + (lane >> 3 & 1) * 8));
        dev::mma_bf16(sum[n], a, b);
        dev::mma_bf16(sum[n + 1], a, b + 2);
      }
    }
    GLM5_UNROLL
    for (int n = 0; n < 4; ++n) {
      GLM5_UNROLL
      for (int i = 0; i < 4; ++i) {
        tiles.products[(g + (i >> 1) * 8) * kProductStride + warp * 32 + n * 8 + 2 * t + (i & 1)] = sum[n][i];
      }
    }
    dev::sync_threads();
    if (h + kHeadTile >= shape.heads) after_use();
    const int heads = dev::least(shape.heads - h, kHeadTile);
    for (int i = 0; i < heads; ++i) {
      const float product = tiles.products[i * kProductStride + dev::thread_index()];
      score = add_head(score, tiles.weights[h + i], Bytes ? product * scale : product);
    }
    dev::sync_threads();
  }
  return score;
}
struct alignas(16) FourFloats {
  float x[4];
};
template <bool Bytes, class AfterUse>
GLM5_DEVICE float score_tile(const IndexShape& shape, const IndexTiles<float>& tiles, const AfterUse& after_use) {
  const int stride = index_stride<float>(shape), key = dev::thread_index();
  float score = 0.0f;
  for (int h = 0; h < shape.wide_heads() && key < tile_keys<float>(); h += kHeadTile) {
    float sum[kHeadTile] = {};
    for (int d = 0; d < shape.wide_dim(); d += 4) {
      const FourFloats k = dev::load_wide<FourFloats>(tiles.keys + (key * stride + d));
      GLM5_UNROLL
      for (int i = 0; i < kHeadTile; ++i) {
        const FourFloats q = dev::load_wide<FourFloats>(tiles.queries + ((h + i) * stride + d));
        GLM5_UNROLL
        for (int j = 0; j < 4; ++j) sum[i] = dev::fused(q.x[j], k.x[j], sum[i]);
      }
    }
    GLM5_UNROLL
    for (int i = 0; i < kHeadTile; ++i) {
      if (h + i < shape.heads) score = add_head(score, tiles.weights[h + i], sum[i]);
    }
  }
  dev::sync_threads();
  after_use();
  return score;
}

}  // namespace glm5::cuda
