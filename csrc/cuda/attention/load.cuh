// Rows of queries and keys on their way to shared memory: [C, padded to 16][R, padded to 16], zeros in the padding and
// in absent rows.
#pragma once

#include "cuda/attention/shape.cuh"
#include "cuda/dev/cp_async.h"

namespace glm5::cuda {

// A cache in the activation dtype.
template <class T>
struct PlainCache {
  static constexpr bool kBytes = false;
  const T* rows;
};
// fp8_ds_mla: C codes, a scale for each 128 of them, R bf16 values; rows promise no alignment.
struct ByteCache {
  static constexpr bool kBytes = true;
  const dev::u8* rows;
};

GLM5_DEVICE dev::u32 word_at(const dev::u8* p) {
  return p[0] | static_cast<dev::u32>(p[1]) << 8 | static_cast<dev::u32>(p[2]) << 16 |
         static_cast<dev::u32>(p[3]) << 24;
}
GLM5_DEVICE float bf16_at(const dev::u8* p) {
  return dev::float_of((p[0] | static_cast<dev::u32>(p[1]) << 8) << 16);
}

// Whether rows of T can be moved 16 bytes at a time.
template <class T>
GLM5_DEVICE bool rows_are_wide(const AttentionShape& shape, const T* rows) {
  constexpr int kEach = 16 / sizeof(T);
  return shape.latent % kEach == 0 && shape.rope % kEach == 0 && dev::aligned_16(rows);
}

// Zeros in the padding of `count` rows, once: nothing is copied there.
template <class T>
GLM5_DEVICE void clear_padding(const AttentionShape& shape, dev::Shared<T> tile, int stride, int count) {
  const int latent_pad = shape.wide_latent() - shape.latent, rope_pad = shape.wide_rope() - shape.rope;
  const int pad = latent_pad + rope_pad;
  for (int i = dev::thread_index(); i < count * pad; i += kAttentionThreads) {
    const int row = i / pad, at = i % pad;
    const int column = at < latent_pad ? shape.latent + at : shape.wide_latent() + shape.rope + at - latent_pad;
    tile[row * stride + column] = dev::narrow<T>(0.0f);
  }
}

// Begins to copy `count` rows; row(i) is the source of the i-th, null for zeros. To be committed and waited for.
template <class T, class Row>
GLM5_DEVICE void copy_rows(const AttentionShape& shape, bool wide, dev::Shared<T> tile, int stride, int count,
                           const T* some, const Row& row) {
  constexpr int kEach = 16 / sizeof(T);
  if (wide) {
    const int chunks = shape.row() / kEach;
    for (int i = dev::thread_index(); i < count * chunks; i += kAttentionThreads) {
      const int r = i / chunks, column = i % chunks * kEach;
      const int to = column < shape.latent ? column : shape.wide_latent() + column - shape.latent;
      const T* from = row(r);
      dev::cp_async_16(tile + (r * stride + to), from == nullptr ? some : from + column, from != nullptr);
    }
    return;
  }
  for (int i = dev::thread_index(); i < count * shape.row(); i += kAttentionThreads) {
    const int r = i / shape.row(), column = i % shape.row();
    const int to = column < shape.latent ? column : shape.wide_latent() + column - shape.latent;
    const T* from = row(r);
    tile[r * stride + to] = from == nullptr ? dev::narrow<T>(0.0f) : from[column];
  }
}

// The block's queries; rows past its heads are zeros.
template <class T>
GLM5_DEVICE void copy_queries(const AttentionShape& shape, const Place& place, const T* q, dev::Shared<T> tile,
                              int stride) {
  const T* mine = q + (static_cast<dev::i64>(place.token) * shape.heads + place.head) * shape.row();
  copy_rows(shape, rows_are_wide(shape, q), tile, stride, kTileHeads, q, [&](int r) {
    return r < place.heads ? mine + static_cast<dev::i64>(r) * shape.row() : static_cast<const T*>(nullptr);
  });
}

// `count` keys from the `first` of a block on.
template <class T>
GLM5_DEVICE void copy_keys(const AttentionShape& shape, const PlainCache<T>& cache, dev::Shared<dev::i64> slots,
                           int first, int count, dev::Shared<T> tile, int stride) {
  copy_rows(shape, rows_are_wide(shape, cache.rows), tile, stride, count, cache.rows, [&](int r) {
    const dev::i64 slot = slots[first + r];
    return slot >= 0 ? cache.rows + slot * shape.row() : static_cast<const T*>(nullptr);
  });
}

// Byte rows, decoded: T = bf16 keeps the bare codes, which are exact, and leaves the scales to the caller; f32 takes
// the products.
template <class T>
GLM5_DEVICE void decode_keys(const AttentionShape& shape, const ByteCache& cache, dev::Shared<dev::i64> slots,
                             int first, int count, dev::Shared<T> tile, int stride, dev::Shared<float> scales) {
  constexpr bool kScaled = sizeof(T) == 4;
  const int groups = shape.groups();
  if (!kScaled) {
    for (int i = dev::thread_index(); i < count * groups; i += kAttentionThreads) {
      const dev::i64 slot = slots[first + i / groups];
      const dev::u8* from = cache.rows + slot * shape.byte_row() + shape.latent + 4 * (i % groups);
      scales[(first + i / groups) * kMostGroups + i % groups] = slot >= 0 ? dev::float_of(word_at(from)) : 0.0f;
    }
    if (shape.latent % 16 == 0 && groups % 4 == 0 && shape.rope % 8 == 0 && dev::aligned_16(cache.rows)) {
      const int code_chunks = shape.latent / 16, chunks = code_chunks + shape.rope / 8;
      for (int i = dev::thread_index(); i < count * chunks; i += kAttentionThreads) {
        const int r = i / chunks, c = i % chunks;
        const dev::i64 slot = slots[first + r];
        const dev::u8* row = cache.rows + slot * shape.byte_row();
        dev::Wide low{}, high{};
        if (c >= code_chunks) {
          if (slot >= 0) low = dev::load_16(row + shape.latent + 4 * groups + (c - code_chunks) * 16);
          dev::store_wide(tile + (r * stride + shape.wide_latent() + (c - code_chunks) * 8), low);
          continue;
        }
        if (slot >= 0) {
          const dev::Wide codes = dev::load_16(row + c * 16);
          GLM5_UNROLL
          for (int j = 0; j < 8; ++j) {
            const dev::u32 two = codes.word[j / 2] >> (j % 2 * 16);
            const dev::u32 bits = dev::pack(dev::narrow<dev::bf16>(dev::float_of_e4m3(two)),
                                            dev::narrow<dev::bf16>(dev::float_of_e4m3(two >> 8)));
            (j < 4 ? low : high).word[j % 4] = bits;
          }
        }
        dev::store_wide(tile + (r * stride + c * 16), low);
        dev::store_wide(tile + (r * stride + c * 16 + 8), high);
      }
      return;
    }
  }
  for (int i = dev::thread_index(); i < count * shape.row(); i += kAttentionThreads) {
    const int r = i / shape.row(), column = i % shape.row();
    const dev::i64 slot = slots[first + r];
    const dev::u8* row = cache.rows + slot * shape.byte_row();
    const dev::u8* after = row + shape.latent;
    float value = 0.0f;
    if (slot >= 0 && column < shape.latent) {
      value = dev::float_of_e4m3(row[column]);
      if (kScaled) value *= dev::float_of(word_at(after + 4 * (column / kGroup)));
    } else if (slot >= 0) {
      value = bf16_at(after + 4 * groups + 2 * (column - shape.latent));
    }
    const int to = column < shape.latent ? column : shape.wide_latent() + column - shape.latent;
    tile[r * stride + to] = dev::narrow<T>(value);
  }
}

}  // namespace glm5::cuda
