// The experts of a layer without a copy of x, of the sorted rows or of a weight: rows are gathered where the first
// product reads them, and the second product is weighed and summed as its tiles appear.
#include "glm5/ops/moe_experts.h"

#include "cpu/grouped_tile.h"
#include "cpu/kernel.h"
#include "cpu/rows/gated.h"
#include "cpu/rows/routed_sum.h"
#include "cpu/rows/routing.h"

namespace glm5::GLM5_LEVEL_NS {
namespace {

constexpr int64_t kHiddenBytes = int64_t{64} << 20;  // tokens are taken in chunks whose hidden rows fit
constexpr int64_t kSumBytes = int64_t{1} << 19;      // f32 sums that stay in the second-level cache
constexpr int64_t kPairs = kPanelOuts;               // gate rows that stand before the up rows they belong to

struct Experts {
  int64_t n, inner, count, active;  // N, I, E, A
  float limit;
};

// One chunk of tokens. Tensors start at its first token.
template <class T>
struct Chunk {
  // Hidden rows hold values of T; as T where the level multiplies T by T, else widened once for all outputs.
  using Hidden = std::conditional_t<kBf16Products<T, T>, T, float>;
  static constexpr int64_t kSplit = kSplitOuts<Hidden, T>;

  const Experts& shape;
  int64_t tokens;
  const T *x, *w_gate_up, *w_down;
  const float* weights;
  const int32_t *row_ids, *offsets;
  Hidden* hidden;  // [rows, stride]
  int64_t stride;
  T* y;

  // hidden = silu(gate) * up. Outputs are taken in the order: kPairs gate rows, their up rows, the next gate rows, ...
  // so a gate waits in hidden for its up, which the same thread computes next.
  void first_product() const {
    const int64_t n = shape.n, inner = shape.inner, active = shape.active;
    const float limit = shape.limit;
    grouped_gemm_tiles(
        offsets, shape.count, 2 * inner, n, 2 * kPairs, [=](int64_t r) { return x + row_ids[r] / active * n; },
        [=](int64_t e, int64_t o) {
          const int64_t first = o / (2 * kPairs) * kPairs, pairs = inner - first < kPairs ? inner - first : kPairs;
          const int64_t j = o - 2 * first, row = j < pairs ? first + j : inner + first + (j - pairs);
          return w_gate_up + (e * 2 * inner + row) * n;
        },
        [=](int64_t r, int64_t o, const float* values, int64_t count) {
          const int64_t first = o / (2 * kPairs) * kPairs, pairs = inner - first < kPairs ? inner - first : kPairs;
          Hidden* to = hidden + r * stride + first;
          const int64_t begin = o - 2 * first, end = begin + count;  // gates end and ups begin at `pairs`
          const int64_t gates = begin >= pairs ? 0 : end < pairs ? count : pairs - begin;
          for_lanes(gates, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
            store(to + begin + i, round_to<T>(load(values + i, lanes)), lanes);
          });
          Hidden* pair = to + begin + gates - pairs;
          for_lanes(count - gates, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
            const f32v up = round_to<T>(load(values + gates + i, lanes));
            store(pair + i, gated<T>(load(pair + i, lanes), up, limit), lanes);
          });
        });
  }

  // y for tokens [t0, t1) and columns [o0, o1): experts ascending, so each token's sum runs in the order of ids.
  void second_product(int64_t t0, int64_t t1, int64_t o0, int64_t o1) const {
    const int64_t n = shape.n, inner = shape.inner, active = shape.active, width = o1 - o0;
    Scratch scratch;
    float* sums = scratch.take<float>((t1 - t0) * width);
    std::memset(sums, 0, (t1 - t0) * width * sizeof(float));
    for (int64_t e = 0; e < shape.count; ++e) {
      const int64_t begin = first_not_below(row_ids, offsets[e], offsets[e + 1], t0 * active);
      const int64_t end = first_not_below(row_ids, begin, offsets[e + 1], t1 * active);
      if (begin == end) continue;
      gemm_block([=](int64_t r) { return static_cast<const Hidden*>(hidden + r * stride); }, begin, end,
                 [=](int64_t o) { return w_down + (e * n + o) * inner; }, o0, o1, inner,
                 [=](int64_t r, int64_t o, const float* values, int64_t count) {
                   const int32_t slot = row_ids[r];
                   add_routed<T>(values, weights[slot], count, sums + (slot / active - t0) * width + (o - o0));
                 });
    }
    for (int64_t t = t0; t < t1; ++t) store_row(sums + (t - t0) * width, width, y + t * n + o0);
  }

  // Tokens and columns of one unit of the second product. Its sums must stay in cache, and there must be units enough
  // for the threads; among such splits the one that reads least wins: every token part reads the weights once, every
  // column part the hidden rows.
  void split_second_product(int64_t* part, int64_t* width) const {
    const int64_t rows = offsets[shape.count], share = (rows * shape.n * (shape.inner + 1)) >> 16;
    int64_t experts = 0;
    for (int64_t e = 0; e < shape.count; ++e) experts += offsets[e + 1] > offsets[e];
    int64_t wanted = 4 * get_num_threads();
    if (wanted > share) wanted = share > 1 ? share : 1;
    int64_t best_units = 0, best_reads = 0;
    for (int64_t columns = 1;; ++columns) {
      int64_t w = (shape.n + columns - 1) / columns;
      w = (w + kSplit - 1) / kSplit * kSplit;
      int64_t t = kSumBytes / 4 / w;
      t = t < 1 ? 1 : t > tokens ? tokens : t;
      const int64_t column_parts = (shape.n + w - 1) / w, token_parts = (tokens + t - 1) / t;
      int64_t units = column_parts * token_parts;
      if (units > wanted) units = wanted;
      const int64_t reads = token_parts * experts * shape.n * static_cast<int64_t>(sizeof(T)) + column_parts * rows * 4;
      if (units > best_units || (units == best_units && reads < best_reads)) {
        best_units = units, best_reads = reads, *part = t, *width = w;
      }
      if (w == kSplit) return;
    }
  }

  void second_product() const {
    if (shape.n == 0) return;
    int64_t part = 1, width = kSplit;
    split_second_product(&part, &width);
    const int64_t column_parts = (shape.n + width - 1) / width, units = (tokens + part - 1) / part * column_parts;
    const bool small = (offsets[shape.count] * shape.n * (shape.inner + 1)) >> 16 == 0;
    parallel_for(units, small ? units : 1, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t t = unit / column_parts * part, o = unit % column_parts * width;
        second_product(t, t + part < tokens ? t + part : tokens, o, o + width < shape.n ? o + width : shape.n);
      }
    });
  }
};

template <class T>
void moe_experts_typed(const Experts& shape, const TensorView& x, const int32_t* ids, const float* weights,
                       const TensorView& w_gate_up, const TensorView& w_down, const TensorView& y) {
  const int64_t tokens = x.dim(0), active = shape.active, stride = padded_row(shape.inner);
  const T *xs = x.data<T>(), *gate_up = w_gate_up.data<T>(), *down = w_down.data<T>();
  T* to = y.out<T>();
  int64_t chunk = kHiddenBytes / 4 / stride / (active > 0 ? active : 1);
  chunk = chunk < 1 ? 1 : chunk > tokens ? tokens : chunk;
  Scratch scratch;
  int32_t* row_ids = scratch.take<int32_t>(chunk * active);
  int32_t* offsets = scratch.take<int32_t>(shape.count + 1);
  auto* hidden = scratch.take<typename Chunk<T>::Hidden>(chunk * active * stride);
  for (int64_t t = 0; t < tokens; t += chunk) {
    const int64_t count = tokens - t < chunk ? tokens - t : chunk;
    sort_slots(ids + t * active, count * active, shape.count, row_ids, offsets);
    const Chunk<T> part{shape,   count,  xs + t * shape.n, gate_up,         down, weights + t * active, row_ids,
                        offsets, hidden, stride,           to + t * shape.n};
    part.first_product();
    part.second_product();
  }
}

}  // namespace
}  // namespace glm5::GLM5_LEVEL_NS

GLM5_KERNEL(moe_experts,
            (const Context& ctx, const TensorView& x, const TensorView& ids, const TensorView& weights,
             const TensorView& w_gate_up, const TensorView& w_down, const std::optional<double>& limit,
             const TensorView& y),
            (ctx, x, ids, weights, w_gate_up, w_down, limit, y)) {
  (void)ctx;
  const Experts shape{x.dim(1), w_down.dim(2), w_down.dim(0), ids.dim(1), limit_or_none(limit)};
  const int32_t* experts = ids.data<int32_t>();
  const float* route = weights.data<float>();
  check_ids("moe_experts", experts, ids.dim(0), shape.active, shape.count);
  for_float_type("moe_experts: x", x.dtype(),
                 [&](auto type) { moe_experts_typed<decltype(type)>(shape, x, experts, route, w_gate_up, w_down, y); });
}
