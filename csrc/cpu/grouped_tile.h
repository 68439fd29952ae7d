// One product per expert over rows sorted by expert, split over the thread pool so that many experts with one row
// and one expert with many rows both keep every thread busy. The bits are gemm_tile's.
#pragma once

#include "cpu/gemm_tile.h"

namespace glm5::GLM5_LEVEL_NS {

template <class F>
using expert_row_element = std::remove_cv_t<std::remove_pointer_t<decltype(std::declval<F>()(int64_t{}, int64_t{}))>>;

// Rows offsets[e] .. offsets[e + 1] times the `outs` outputs of expert e.
//   x_row(r), w_row(e, o): rows of k elements; emit(r, o, values, n) as for gemm_block
//   granule: outputs are split at multiples of it
template <class XRow, class WRow, class Emit>
inline void grouped_gemm_tiles(const int32_t* offsets, int64_t experts, int64_t outs, int64_t k, int64_t granule,
                               XRow&& x_row, WRow&& w_row, Emit&& emit) {
  const int64_t all_rows = offsets[experts];
  if (all_rows <= 0 || outs <= 0) return;
  struct Group {
    int64_t expert, first_unit, parts, width;
  };
  Scratch scratch;
  Group* groups = scratch.take<Group>(all_rows < experts ? all_rows : experts);
  const int64_t block = block_rows<row_element<XRow>, expert_row_element<WRow>>(k), work = all_rows * outs * (k + 1);
  // A unit is about a quarter of a thread's share, and never below 64K products: waking a thread costs more.
  const int64_t share = work / (4 * get_num_threads());
  const int64_t target = share > (1 << 16) ? share : 1 << 16;
  int64_t count = 0, units = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t rows = offsets[e + 1] - offsets[e];
    if (rows == 0) continue;
    int64_t width = target / ((rows < block ? rows : block) * (k + 1));
    width = width < granule ? granule : width > outs ? outs : width;
    width = (width + granule - 1) / granule * granule;
    groups[count++] = {e, units, (outs + width - 1) / width, width};
    units += (outs + width - 1) / width * ((rows + block - 1) / block);
  }
  parallel_for(units, work >> 16 ? 1 : units, [&](int64_t begin, int64_t end) {
    int64_t g = 0;
    for (int64_t unit = begin; unit < end; ++unit) {
      while (g + 1 < count && groups[g + 1].first_unit <= unit) ++g;
      const Group& group = groups[g];
      const int64_t e = group.expert, last_row = offsets[e + 1], at = unit - group.first_unit;
      const int64_t r = offsets[e] + at / group.parts * block, o = at % group.parts * group.width;
      gemm_block(
          x_row, r, r + block < last_row ? r + block : last_row, [&](int64_t j) { return w_row(e, j); }, o,
          o + group.width < outs ? o + group.width : outs, k, emit);
    }
  });
}

}  // namespace glm5::GLM5_LEVEL_NS
