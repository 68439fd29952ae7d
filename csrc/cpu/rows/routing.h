// Which rows belong to which expert: the checks and the stable order that all expert kernels share.
#pragma once

#include <cstdint>

#include "glm5/check.h"
#include "glm5/scratch.h"

namespace glm5::GLM5_LEVEL_NS {

// Throws unless every id of [T, A] is -1 or an expert, and no token names an expert twice.
inline void check_ids(const char* op, const int32_t* ids, int64_t tokens, int64_t active, int64_t experts) {
  if (tokens * active > INT32_MAX) {
    fail("%s: ids has %lld elements, needs at most %d", op, static_cast<long long>(tokens * active), INT32_MAX);
  }
  Scratch scratch;
  int64_t* last_token = scratch.take<int64_t>(experts);  // the latest token that named the expert
  for (int64_t e = 0; e < experts; ++e) last_token[e] = -1;
  for (int64_t i = 0; i < tokens * active; ++i) {
    const int32_t id = ids[i];
    if (id < -1 || id >= experts) {
      fail("%s: an expert id is %d, needs -1 or 0 <= id < %lld", op, id, static_cast<long long>(experts));
    }
    if (id < 0) continue;
    if (last_token[id] == i / active) {
      fail("%s: token %lld names expert %d twice, needs distinct experts", op, static_cast<long long>(i / active), id);
    }
    last_token[id] = i / active;
  }
}

// Flat slots t * A + j in ascending (expert, slot) order to row_ids, -1 past the last; where each expert begins to
// offsets[E + 1].
inline void sort_slots(const int32_t* ids, int64_t slots, int64_t experts, int32_t* row_ids, int32_t* offsets) {
  for (int64_t e = 0; e <= experts; ++e) offsets[e] = 0;
  for (int64_t i = 0; i < slots; ++i) {
    if (ids[i] >= 0) ++offsets[ids[i] + 1];
  }
  for (int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
  Scratch scratch;
  int32_t* next = scratch.take<int32_t>(experts);
  for (int64_t e = 0; e < experts; ++e) next[e] = offsets[e];
  for (int64_t i = 0; i < slots; ++i) {
    if (ids[i] >= 0) row_ids[next[ids[i]]++] = static_cast<int32_t>(i);
  }
  for (int64_t i = offsets[experts]; i < slots; ++i) row_ids[i] = -1;
}

// Throws unless offsets[E + 1] ascends from 0 to at most `rows`.
inline void check_offsets(const char* op, const int32_t* offsets, int64_t experts, int64_t rows) {
  if (offsets[0] != 0) fail("%s: offsets[0] is %d, needs 0", op, offsets[0]);
  for (int64_t e = 0; e < experts; ++e) {
    if (offsets[e + 1] < offsets[e]) {
      fail("%s: offsets[%lld] is %d after %d, needs ascending offsets", op, static_cast<long long>(e + 1),
           offsets[e + 1], offsets[e]);
    }
  }
  if (offsets[experts] > rows) {
    fail("%s: offsets[%lld] is %d, needs at most %lld rows", op, static_cast<long long>(experts), offsets[experts],
         static_cast<long long>(rows));
  }
}

// The first index in [begin, end) whose slot is not below `slot`; slots ascend there.
inline int64_t first_not_below(const int32_t* row_ids, int64_t begin, int64_t end, int64_t slot) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (row_ids[middle] < slot) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

}  // namespace glm5::GLM5_LEVEL_NS
