#include "glm5/ops/sample.h"

#include "cpu/kernel.h"
#include "cpu/rows/filter.h"
#include "cpu/rows/gumbel.h"

namespace glm5::GLM5_LEVEL_NS {
namespace {

struct Request {
  float temperature;
  Filters filters;
  int64_t seed, position;
};

struct Draw {
  int64_t id;
  float logprob, processed;
};

// The first index of the largest score + noise; a row of -inf gives 0. survivors holds whole kNoiseTokens.
int64_t draw_token(const Request& request, const float* survivors, int64_t n) {
  f32v best = broadcast(-__builtin_inff());
  i32v best_id{};
  alignas(64) float noise[kNoiseTokens];
  for (int64_t first = 0; first < n; first += kNoiseTokens) {
    if (max_of(survivors + first, kNoiseTokens) == -__builtin_inff()) continue;
    gumbel_noise(request.seed, request.position, first, noise);
    for (int j = 0; j < kNoiseTokens; j += kLanes) {
      const f32v score = load(survivors + first + j) + load(noise + j);
      const i32v id = lane_index() + static_cast<int32_t>(first + j);
      best_id = score > best ? id : best_id;
      best = score > best ? score : best;
    }
  }
  int winner = 0;
  for (int lane = 1; lane < kLanes; ++lane) {
    if (best[lane] > best[winner] || (best[lane] == best[winner] && best_id[lane] < best_id[winner])) winner = lane;
  }
  return best_id[winner];
}

void check_numbers(const char* name, const float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (!(values[i] == values[i])) fail("sample: %s[%lld] is nan, needs a number", name, static_cast<long long>(i));
  }
}

Draw sample_row(const float* raw, int64_t n, const Request& request) {
  const int64_t padded = (n + kNoiseTokens - 1) / kNoiseTokens * kNoiseTokens;
  Scratch scratch;
  float *logits = scratch.take<float>(n), *scaled = scratch.take<float>(n), *survivors = scratch.take<float>(padded);
  const f32v nothing = broadcast(-__builtin_inff());
  for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    const f32v v = load(raw + i, lanes);
    store(logits + i, v == v ? v : nothing, lanes);
  });
  const float lse = log_sum_exp(logits, n);
  if (request.temperature <= 0.0f) {
    const int64_t id = first_best(logits, n);
    return {id, logits[id] - lse, 0.0f};
  }
  for_lanes(n, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    store(scaled + i, load(logits + i, lanes) / request.temperature, lanes);
  });
  filter_row(logits, scaled, n, request.filters, survivors);
  for (int64_t i = n; i < padded; ++i) survivors[i] = -__builtin_inff();
  const int64_t id = draw_token(request, survivors, n);
  return {id, logits[id] - lse, scaled[id] - log_sum_exp(survivors, n)};
}

}  // namespace
}  // namespace glm5::GLM5_LEVEL_NS

GLM5_KERNEL(sample,
            (const Context& ctx, const TensorView& logits, const TensorView& temperature, const TensorView& top_k,
             const TensorView& top_p, const TensorView& min_p, const TensorView& seed, const TensorView& position,
             const TensorView& ids, const TensorView& logprob, const TensorView& logprob_processed),
            (ctx, logits, temperature, top_k, top_p, min_p, seed, position, ids, logprob, logprob_processed)) {
  (void)ctx;
  const int64_t rows = logits.dim(0), n = logits.dim(1);
  if (n == 0) fail("sample: V is 0, needs at least one token to draw");
  if (n > INT32_MAX - kNoiseTokens) {
    fail("sample: V is %lld, needs at most %d", static_cast<long long>(n), INT32_MAX - kNoiseTokens);
  }
  const float *values = logits.data<float>(), *heat = temperature.data<float>();
  const float *shares = top_p.data<float>(), *least = min_p.data<float>();
  check_numbers("temperature", heat, rows);
  check_numbers("top_p", shares, rows);
  check_numbers("min_p", least, rows);
  const int32_t* counts = top_k.data<int32_t>();
  const int64_t *seeds = seed.data<int64_t>(), *places = position.data<int64_t>();
  int64_t* chosen = ids.out<int64_t>();
  float *raw = logprob.out<float>(), *processed = logprob_processed.out<float>();
  parallel_for(rows, rows_per_range(16 * n), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const Request request{heat[b], {counts[b], shares[b], least[b]}, seeds[b], places[b]};
      const Draw draw = sample_row(values + b * n, n, request);
      chosen[b] = draw.id, raw[b] = draw.logprob, processed[b] = draw.processed;
    }
  });
}
