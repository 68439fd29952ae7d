#include "glm5/ops/moe_unpermute.h"

#include <cstring>

#include "cpu/kernel.h"
#include "cpu/rows/routed_sum.h"

namespace glm5::GLM5_LEVEL_NS {
namespace {

// Throws unless every id is -1 or a slot and no slot stands twice; counts the rows of each token into begins[t + 1].
void check_row_ids(const int32_t* row_ids, int64_t rows, int64_t tokens, int64_t active, int64_t* begins) {
  Scratch scratch;
  bool* seen = scratch.take<bool>(tokens * active);
  std::memset(seen, 0, tokens * active);
  std::memset(begins, 0, (tokens + 1) * sizeof *begins);
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t slot = row_ids[r];
    if (slot < -1 || slot >= tokens * active) {
      fail("moe_unpermute: row_ids[%lld] is %d, needs -1 or 0 <= id < %lld slots", static_cast<long long>(r), slot,
           static_cast<long long>(tokens * active));
    }
    if (slot < 0) continue;
    if (seen[slot]) fail("moe_unpermute: row_ids holds slot %d twice, needs distinct slots", slot);
    seen[slot] = true;
    ++begins[slot / active + 1];
  }
}

}  // namespace
}  // namespace glm5::GLM5_LEVEL_NS

GLM5_KERNEL(moe_unpermute,
            (const Context& ctx, const TensorView& rows, const TensorView& row_ids, const TensorView& weights,
             const TensorView& y),
            (ctx, rows, row_ids, weights, y)) {
  (void)ctx;
  const int64_t n = y.dim(1), tokens = weights.dim(0), active = weights.dim(1), count = row_ids.dim(0);
  const int32_t* slots = row_ids.data<int32_t>();
  const float* route = weights.data<float>();
  Scratch scratch;
  // Rows of token t are order[begins[t]] .. order[begins[t + 1] - 1], ascending: the order of the experts.
  int64_t *begins = scratch.take<int64_t>(tokens + 1), *order = scratch.take<int64_t>(count);
  int64_t* next = scratch.take<int64_t>(tokens);
  check_row_ids(slots, count, tokens, active, begins);
  for (int64_t t = 0; t < tokens; ++t) begins[t + 1] += begins[t], next[t] = begins[t];
  for (int64_t r = 0; r < count; ++r) {
    if (slots[r] >= 0) order[next[slots[r] / active]++] = r;
  }
  for_float_type("moe_unpermute: rows", rows.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* from = rows.data<T>();
    T* to = y.out<T>();
    parallel_for(tokens, rows_per_range(n * (active + 1)), [&](int64_t begin, int64_t end) {
      Scratch own;
      float* sums = own.take<float>(n);
      for (int64_t t = begin; t < end; ++t) {
        std::memset(sums, 0, n * sizeof(float));
        for (int64_t i = begins[t]; i < begins[t + 1]; ++i) {
          add_routed<T>(from + order[i] * n, route[slots[order[i]]], n, sums);
        }
        store_row(sums, n, to + t * n);
      }
    });
  });
}
