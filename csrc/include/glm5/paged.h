// Rows of a paged cache: where a request's keys lie, and the value checks an op makes before it writes anything.
#pragma once

#include <cstdint>

#include "glm5/tensor.h"

namespace glm5 {

// Throws `<op>: <name>[i] is <value>, needs <low> to <high>` for the first of n values outside [low, high].
void check_range(const char* op, const char* name, const int32_t* values, int64_t n, int64_t low, int64_t high);
void check_range(const char* op, const char* name, const int64_t* values, int64_t n, int64_t low, int64_t high);

// Throws unless each of n slots is -1 or below `pool`, and none is named twice: chance would pick the winner.
void check_slots(const char* op, const int64_t* slots, int64_t n, int64_t pool);

// Whether a cache's format is `bytes` ("fp8_ds_mla", "fp8") rather than "plain"; throws for any other name.
bool is_byte_format(const char* op, const char* format, const char* bytes);

// The physical pages of every request: block_table i32[B, M] over a pool of `pages` pages of `page_size` tokens.
struct PageTable {
  PageTable(const TensorView& block_table, int64_t pages, int64_t page_size);

  const int32_t* table;
  int64_t requests;
  int64_t pages_each;
  int64_t pages;
  int64_t page_size;

  GLM5_INLINE int64_t capacity() const { return pages_each * page_size; }
  // Physical row (page * page_size + offset) of a logical position.
  GLM5_INLINE int64_t slot(int64_t request, int64_t position) const {
    // Positions fit 32 bits, where a division is several times cheaper.
    const uint32_t size = static_cast<uint32_t>(page_size), at = static_cast<uint32_t>(position);
    const uint32_t page = at / size;
    return static_cast<int64_t>(table[request * pages_each + page]) * page_size + (at - page * size);
  }
};

// request_ids i32[T] lie in [-1, B); kv_lens i32[T] of the rows that are not padding (request -1) lie in
// [0, min(capacity, max_kv_len)] and their pages exist. The largest length is returned.
int64_t check_lengths(const char* op, const PageTable& table, const TensorView& request_ids, const TensorView& kv_lens,
                      int64_t max_kv_len);

// request_ids as above; every selection of indices i32[T, G, K] of a row that is not padding is strictly ascending
// inside the request's capacity, then -1, and its pages exist.
void check_selections(const char* op, const PageTable& table, const TensorView& request_ids, const TensorView& indices);

}  // namespace glm5
