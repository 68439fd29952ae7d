#include "glm5/ops/moe_gate.h"

#include "cpu/gemm_tile.h"
#include "cpu/kernel.h"
#include "cpu/vec_math.h"

namespace glm5::GLM5_LEVEL_NS {
namespace {

constexpr int64_t kChunk = 1024;  // tokens whose logits exist at a time

struct Router {
  int64_t experts, topk, groups, topk_group;
  bool softmax, renormalise;
  float scale, temperature;
  const float* bias;  // or null
};

GLM5_INLINE bool same_text(const char* a, const char* b) {
  while (*a && *a == *b) ++a, ++b;
  return *a == *b;
}

void check(const Router& r) {
  if (r.groups < 1 || r.experts % r.groups != 0 || (r.groups > 1 && r.experts / r.groups < 2)) {
    fail(
        "moe_gate: n_group is %lld, needs to divide %lld experts into groups of at least 2: a group's score is the sum "
        "of its best two",
        static_cast<long long>(r.groups), static_cast<long long>(r.experts));
  }
  if (r.topk_group < 1 || r.topk_group > r.groups) {
    fail("moe_gate: topk_group is %lld, needs 1 <= topk_group <= %lld groups", static_cast<long long>(r.topk_group),
         static_cast<long long>(r.groups));
  }
  const int64_t most = r.topk_group * (r.experts / r.groups);
  if (r.topk < 0 || r.topk > most) {
    fail("moe_gate: topk is %lld, needs at most %lld, the experts of %lld of %lld groups",
         static_cast<long long>(r.topk), static_cast<long long>(most), static_cast<long long>(r.topk_group),
         static_cast<long long>(r.groups));
  }
  if (!(r.temperature > 0)) fail("moe_gate: temperature is %g, needs a number > 0", static_cast<double>(r.temperature));
}

// Marks the k largest of values: taken[i] becomes true. Ties go to the lower index; values holds no NaN. Only indices
// with allowed[i / run] compete (null: all do).
void take_best(const float* values, int64_t n, int64_t k, const bool* allowed, int64_t run, bool* taken) {
  for (int64_t i = 0; i < n; ++i) taken[i] = false;
  for (; k > 0; --k) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; ++i) {
      if (taken[i] || (allowed && !allowed[i / run])) continue;
      if (best < 0 || values[i] > values[best]) best = i;
    }
    taken[best] = true;
  }
}

// Logits of one token to scores, in place.
void to_scores(const Router& r, float* logits) {
  const int64_t n = r.experts;
  if (r.temperature != 1.0f) {
    for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
      store(logits + i, load(logits + i, lanes) / r.temperature, lanes);
    });
  }
  if (!r.softmax) {
    for_lanes(n, [&](int64_t i, auto lanes)
                     __attribute__((always_inline)) { store(logits + i, sigmoid(load(logits + i, lanes)), lanes); });
    return;
  }
  f32v most = broadcast(-__builtin_inff());
  for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    most = max(fill_past(load(logits + i, lanes), lanes, -__builtin_inff()), most);
  });
  const f32v shift = broadcast(reduce_max(most));
  const float sum = sum_row(n, [&](f32v chain, int64_t i, auto lanes) __attribute__((always_inline)) {
    const f32v p = exp(load(logits + i, lanes) - shift);
    store(logits + i, p, lanes);
    return chain + fill_past(p, lanes, 0.0f);
  });
  for_lanes(n, [&](int64_t i, auto lanes)
                   __attribute__((always_inline)) { store(logits + i, load(logits + i, lanes) / sum, lanes); });
}

// The choice of one token from its scores; choice and group_scores are scratch of E and n_group values, taken and
// kept of E and n_group marks.
void choose(const Router& r, const float* scores, float* choice, bool* taken, float* group_scores, bool* kept,
            int32_t* ids, float* weights) {
  for (int64_t i = 0; i < r.experts; ++i) {
    const float value = r.bias ? scores[i] + r.bias[i] : scores[i];
    choice[i] = value == value ? value : -__builtin_inff();
  }
  const int64_t size = r.experts / r.groups;
  if (r.groups > 1) {
    for (int64_t g = 0; g < r.groups; ++g) {
      float first = -__builtin_inff(), second = first;
      for (int64_t i = g * size; i < (g + 1) * size; ++i) {
        if (choice[i] > first) {
          second = first, first = choice[i];
        } else if (choice[i] > second) {
          second = choice[i];
        }
      }
      const float sum = first + second;
      group_scores[g] = sum == sum ? sum : -__builtin_inff();
    }
    take_best(group_scores, r.groups, r.topk_group, nullptr, 1, kept);
  }
  take_best(choice, r.experts, r.topk, r.groups > 1 ? kept : nullptr, size, taken);
  int64_t slot = 0;
  float sum = 0.0f;
  for (int64_t i = 0; i < r.experts; ++i) {
    if (!taken[i]) continue;
    ids[slot] = static_cast<int32_t>(i);
    weights[slot++] = scores[i];
    sum += scores[i];
  }
  for (int64_t j = 0; j < r.topk; ++j) {
    const float weight = r.renormalise ? weights[j] / (sum + 1e-20f) : weights[j];
    weights[j] = weight * r.scale;
  }
}

template <class T>
void moe_gate_typed(const Router& r, const TensorView& x, const float* w, int32_t* ids, float* weights) {
  const int64_t n = x.dim(-1), tokens = x.rows(), e = r.experts;
  const T* from = x.data<T>();
  Scratch scratch;
  float* logits = scratch.take<float>((tokens < kChunk ? tokens : kChunk) * e);
  for (int64_t t0 = 0; t0 < tokens; t0 += kChunk) {
    const int64_t rows = tokens - t0 < kChunk ? tokens - t0 : kChunk;
    gemm(
        rows, e, n, [=](int64_t t) { return from + (t0 + t) * n; }, [=](int64_t o) { return w + o * n; },
        [=](int64_t t, int64_t o, const float* values, int64_t count) {
          for (int64_t j = 0; j < count; ++j) logits[t * e + o + j] = values[j];
        });
    parallel_for(rows, rows_per_range((r.topk + 8) * e), [&](int64_t begin, int64_t end) {
      Scratch own;
      float *choice = own.take<float>(e), *group_scores = own.take<float>(r.groups);
      bool *taken = own.take<bool>(e), *kept = own.take<bool>(r.groups);
      for (int64_t t = begin; t < end; ++t) {
        to_scores(r, logits + t * e);
        choose(r, logits + t * e, choice, taken, group_scores, kept, ids + (t0 + t) * r.topk,
               weights + (t0 + t) * r.topk);
      }
    });
  }
}

}  // namespace
}  // namespace glm5::GLM5_LEVEL_NS

GLM5_KERNEL(moe_gate,
            (const Context& ctx, const TensorView& x, const TensorView& w, const std::optional<TensorView>& bias,
             int64_t topk, int64_t n_group, int64_t topk_group, const char* score, bool renormalise, double scale,
             double temperature, const TensorView& ids, const TensorView& weights),
            (ctx, x, w, bias, topk, n_group, topk_group, score, renormalise, scale, temperature, ids, weights)) {
  (void)ctx;
  const bool softmax = same_text(score, "softmax");
  if (!softmax && !same_text(score, "sigmoid")) {
    fail("moe_gate: score is '%.40s', needs 'sigmoid' or 'softmax'", score);
  }
  const Router router{w.dim(0),
                      topk,
                      n_group,
                      topk_group,
                      softmax,
                      renormalise,
                      static_cast<float>(scale),
                      static_cast<float>(temperature),
                      bias ? bias->data<float>() : nullptr};
  check(router);
  const float* matrix = w.data<float>();
  int32_t* chosen = ids.out<int32_t>();
  float* weigh = weights.out<float>();
  for_float_type("moe_gate: x", x.dtype(),
                 [&](auto type) { moe_gate_typed<decltype(type)>(router, x, matrix, chosen, weigh); });
}
