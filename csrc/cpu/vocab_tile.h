// Logits of a head, one block of the vocabulary at a time: they are reduced where they are made, [T, V] never exists.
#pragma once

#include "cpu/gemm_tile.h"
#include "cpu/rows/logsumexp.h"

namespace glm5::GLM5_LEVEL_NS {

constexpr int64_t kVocabRows = 128;                   // rows of logits beside a block of 1024: 512 KiB
constexpr int64_t kVocabPartials = int64_t{1} << 20;  // block results kept at a time

// The bits of `linear` with f32 output, row by row:
//   on_block(row, first, logits, n) -> ExpSum of logits [first, first + n) of the row; called from any thread
//   on_row(row, total): every block merged, ascending
template <class T, class OnBlock, class OnRow>
inline void for_vocab_blocks(const T* hidden, const T* head, int64_t rows, int64_t n, int64_t vocabulary,
                             OnBlock&& on_block, OnRow&& on_row) {
  const int64_t blocks = (vocabulary + kVocabBlock - 1) / kVocabBlock;
  int64_t chunk = kVocabPartials / (blocks > 0 ? blocks : 1);
  chunk = chunk < kVocabRows ? kVocabRows : chunk > rows ? rows : chunk;
  Scratch scratch;
  ExpSum* partials = scratch.take<ExpSum>(chunk * blocks);
  for (int64_t r0 = 0; r0 < rows; r0 += chunk) {
    const int64_t count = rows - r0 < chunk ? rows - r0 : chunk;
    // Rows are split further only where the blocks are too few for the threads.
    const int64_t wanted = 4 * get_num_threads() / (blocks > 0 ? blocks : 1) + 1;
    int64_t part = (count / wanted / kTileRows + 1) * kTileRows;
    if (part > kVocabRows) part = kVocabRows;
    const int64_t parts = (count + part - 1) / part, work = count * vocabulary * (n + 1);
    parallel_for(blocks * parts, work >> 16 ? 1 : blocks * parts, [&](int64_t begin, int64_t end) {
      Scratch own;
      float* tile = own.take<float>(part * kVocabBlock);
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t block = unit / parts, first = block * kVocabBlock, r = r0 + unit % parts * part;
        const int64_t last = r + part < r0 + count ? r + part : r0 + count;
        const int64_t end_column = first + kVocabBlock < vocabulary ? first + kVocabBlock : vocabulary;
        gemm_block([=](int64_t row) { return hidden + row * n; }, r, last, [=](int64_t o) { return head + o * n; },
                   first, end_column, n,
                   [=](int64_t row, int64_t o, const float* values, int64_t width) {
                     std::memcpy(tile + (row - r) * kVocabBlock + (o - first), values, width * sizeof(float));
                   });
        for (int64_t row = r; row < last; ++row) {
          partials[(row - r0) * blocks + block] =
              on_block(row, first, static_cast<const float*>(tile + (row - r) * kVocabBlock), end_column - first);
        }
      }
    });
    for (int64_t row = 0; row < count; ++row) {
      ExpSum total;
      for (int64_t block = 0; block < blocks; ++block) merge(total, partials[row * blocks + block]);
      on_row(r0 + row, total);
    }
  }
}

}  // namespace glm5::GLM5_LEVEL_NS
