// The experts of a layer with weights of few bits: tokens are quantised once, whatever the number of their experts,
// hidden rows once more, and the second product is weighed and summed as its panels appear.
#include "glm5/ops/moe_experts_quantised.h"

#include "cpu/kernel.h"
#include "cpu/rows/gated.h"
#include "cpu/rows/routed_sum.h"
#include "cpu/rows/routing.h"
#include "cpu/weight_kinds.h"

namespace glm5::GLM5_LEVEL_NS {
namespace {

constexpr int64_t kHiddenBytes = int64_t{64} << 20;  // tokens are taken in chunks whose hidden rows fit
constexpr int64_t kSumBytes = int64_t{1} << 19;      // f32 sums that stay in the second-level cache

// One chunk of tokens, rows sorted by expert.
struct Chunk {
  int64_t tokens, active;
  Groups groups;
  const int32_t* row_ids;
  const float* weights;
  float limit;
  float* hidden;  // [rows, stride]: values of the activation dtype held as f32
  int64_t stride;
};

// hidden = silu(gate) * up. A unit's gates wait in hidden for their ups, which the same thread computes next.
template <class Kind, class T>
void first_product(const Chunk& chunk, const T* x, const typename Kind::Weight& w) {
  const int64_t k = w.k, inner = w.outs / 2, active = chunk.active, stride = chunk.stride;
  const int32_t* row_ids = chunk.row_ids;
  const float limit = chunk.limit;
  float* hidden = chunk.hidden;
  auto row_of = [=](int64_t r) { return row_ids[r] / active; };
  Scratch scratch;
  const Activations<Kind> q(scratch, chunk.tokens, k);
  q.quantise(chunk.tokens, k, [=](int64_t t) { return x + t * k; });
  Groups groups = chunk.groups;
  groups.pack(scratch, q, k, row_of);
  auto wait = [=](int64_t r, int64_t o, const float* values, int64_t n) {
    float* to = hidden + r * stride + o;
    for_lanes(n, [&](int64_t i, auto lanes)
                     __attribute__((always_inline)) { store(to + i, round_to<T>(load(values + i, lanes)), lanes); });
  };
  auto join = [=](int64_t r, int64_t o, const float* values, int64_t n) {
    float* to = hidden + r * stride + (o - inner);
    for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
      store(to + i, gated<T>(load(to + i, lanes), round_to<T>(load(values + i, lanes)), limit), lanes);
    });
  };
  for_quant_blocks(groups, inner, 2 * k, [&](int64_t e, int64_t r, int64_t r_end, int64_t o, int64_t o_end) {
    const uint8_t* tiles = groups.tiles_at(e, r, Kind::padded(k) / 64);
    const typename Kind::Weight mine = w.at(e);
    quant_block(q, row_of, r, r_end, tiles, mine, o, o_end, wait);
    quant_block(q, row_of, r, r_end, tiles, mine, inner + o, inner + o_end, join);
  });
}

// y for every token and a part of the columns at a time: experts ascending, so each token's sum runs in the order of
// ids.
template <class Kind, class T>
void second_product(const Chunk& chunk, const typename Kind::Weight& w, T* y) {
  const int64_t inner = w.k, n = w.outs, tokens = chunk.tokens, active = chunk.active, stride = chunk.stride;
  const int32_t* row_ids = chunk.row_ids;
  const float *hidden = chunk.hidden, *weights = chunk.weights;
  if (n == 0 || tokens == 0) return;
  auto row_of = [](int64_t r) { return r; };
  Scratch scratch;
  Groups groups = chunk.groups;
  const Activations<Kind> q(scratch, groups.rows(), inner);
  q.quantise(groups.rows(), inner, [=](int64_t r) { return hidden + r * stride; });
  groups.pack(scratch, q, inner, row_of);
  // Sums of a part stay in cache, and there are parts enough for the threads; 2^17 products are worth one.
  const int64_t share = (groups.rows() * n * (inner + 1)) >> 17;
  int64_t parts = 4 * get_num_threads();
  if (parts > share) parts = share > 1 ? share : 1;
  int64_t width = (n + parts - 1) / parts;
  if (width > kSumBytes / 4 / tokens) width = kSumBytes / 4 / tokens;
  width = (width < 1 ? kPanel : (width + kPanel - 1) / kPanel * kPanel);
  parts = (n + width - 1) / width;
  parallel_for(parts, share > 0 ? 1 : parts, [&](int64_t begin, int64_t end) {
    Scratch own;
    float* sums = own.take<float>(tokens * width);
    for (int64_t part = begin; part < end; ++part) {
      const int64_t o = part * width, o_end = o + width < n ? o + width : n, columns = o_end - o;
      std::memset(sums, 0, tokens * columns * sizeof(float));
      for (int64_t e = 0; e < groups.experts; ++e) {
        const int64_t last = groups.offsets[e + 1];
        for (int64_t r = groups.offsets[e]; r < last; r += kBlockRows) {
          quant_block(q, row_of, r, r + kBlockRows < last ? r + kBlockRows : last,
                      groups.tiles_at(e, r, Kind::padded(inner) / 64), w.at(e), o, o_end,
                      [=](int64_t row, int64_t column, const float* values, int64_t count) {
                        const int32_t slot = row_ids[row];
                        add_routed<T>(values, weights[slot], count, sums + slot / active * columns + (column - o));
                      });
        }
      }
      for (int64_t t = 0; t < tokens; ++t) store_row(sums + t * columns, columns, y + t * n + o);
    }
  });
}

// first(chunk, x) and second(chunk, y) over chunks of tokens.
template <class T, class First, class Second>
void over_chunks(const TensorView& x, const int32_t* ids, const float* weights, int64_t active, int64_t experts,
                 int64_t inner, float limit, const TensorView& y, First&& first, Second&& second) {
  const int64_t tokens = x.dim(0), n = x.dim(1), stride = (inner + 15) / 16 * 16 + 16;
  const T* xs = x.data<T>();
  T* to = y.out<T>();
  int64_t most = kHiddenBytes / 4 / stride / (active > 0 ? active : 1);
  most = most < 1 ? 1 : most > tokens ? tokens : most;
  Scratch scratch;
  int32_t* row_ids = scratch.take<int32_t>(most * active);
  int32_t* offsets = scratch.take<int32_t>(experts + 1);
  float* hidden = scratch.take<float>(most * active * stride);
  for (int64_t t = 0; t < tokens; t += most) {
    const int64_t count = tokens - t < most ? tokens - t : most;
    sort_slots(ids + t * active, count * active, experts, row_ids, offsets);
    const Chunk chunk{count, active, {offsets, experts}, row_ids, weights + t * active, limit, hidden, stride};
    first(chunk, xs + t * n);
    second(chunk, to + t * n);
  }
}

}  // namespace
}  // namespace glm5::GLM5_LEVEL_NS

GLM5_KERNEL(moe_experts_quantised,
            (const Context& ctx, const TensorView& x, const TensorView& ids, const TensorView& weights,
             const TensorView& gate_up, const TensorView& gate_up_scales, const TensorView& down,
             const TensorView& down_scales, const std::optional<double>& limit, const TensorView& y),
            (ctx, x, ids, weights, gate_up, gate_up_scales, down, down_scales, limit, y)) {
  (void)ctx;
  if (gate_up.ndim() != 3) fail("moe_experts: the values of w_gate_up have %d axes, need 3", gate_up.ndim());
  const int64_t n = x.dim(1), active = ids.dim(1), experts = gate_up.dim(0), inner = gate_up.dim(1) / 2;
  const int32_t* slots = ids.data<int32_t>();
  const float *route = weights.data<float>(), most = limit_or_none(limit);
  check_ids("moe_experts", slots, ids.dim(0), active, experts);
  auto with_kinds = [&](auto first_kind, const auto& w1, auto second_kind, const auto& w2) {
    for_float_type("moe_experts: x", x.dtype(), [&](auto type) {
      using T = decltype(type);
      over_chunks<T>(
          x, slots, route, active, experts, inner, most, y,
          [&](const Chunk& chunk, const T* xs) { first_product<decltype(first_kind), T>(chunk, xs, w1); },
          [&](const Chunk& chunk, T* to) { second_product<decltype(second_kind), T>(chunk, w2, to); });
    });
  };
  for_weight_kind(
      "moe_experts", "w_gate_up", gate_up, gate_up_scales, experts, 2 * inner, n, [&](auto first_kind, const auto& w1) {
        for_weight_kind("moe_experts", "w_down", down, down_scales, experts, n, inner,
                        [&](auto second_kind, const auto& w2) { with_kinds(first_kind, w1, second_kind, w2); });
      });
}
