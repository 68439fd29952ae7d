// Runs a few kernels at every instruction level that this processor admits to, and compares them with plain loops.
//
// No Python and no torch: the program also runs under an emulator of an older processor or of another architecture,
// where a kernel that used an instruction too new would die of it. Prints one line a level; fails by its exit status.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "glm5/cpuid.h"
#include "glm5/ops/linear.h"
#include "glm5/ops/moe_experts.h"
#include "glm5/ops/rms_norm.h"
#include "glm5/ops/sparse_flash_attention.h"
#include "glm5/ops/topk_indexer.h"
#include "glm5/thread_pool.h"

namespace {

using glm5::Context;
using glm5::TensorView;

struct Type {
  uint8_t code, bits;
};
constexpr Type kF32{kDLFloat, 32}, kBf16{kDLBfloat, 16}, kI32{kDLInt, 32};

// A tensor that owns its memory; floats are kept as double beside it for the plain loops.
class Owned {
 public:
  Owned(Type type, std::vector<int64_t> shape) : shape_(std::move(shape)) {
    int64_t n = 1;
    for (int64_t size : shape_) n *= size;
    bytes_.resize(n * type.bits / 8 + 64);
    tensor_ = DLTensor{bytes_.data(),
                       {kDLCPU, 0},
                       static_cast<int32_t>(shape_.size()),
                       {type.code, type.bits, 1},
                       shape_.data(),
                       nullptr,
                       0};
    values.resize(n);
  }
  TensorView view() const { return TensorView(tensor_, false); }

  void set(int64_t i, double value) {
    const float narrow = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &narrow, 4);
    if (tensor_.dtype.code == kDLInt) {
      reinterpret_cast<int32_t*>(bytes_.data())[i] = static_cast<int32_t>(value);
    } else if (tensor_.dtype.bits == 32) {
      reinterpret_cast<float*>(bytes_.data())[i] = narrow;
    } else {
      reinterpret_cast<uint16_t*>(bytes_.data())[i] = static_cast<uint16_t>(bits >> 16);  // values are chosen exact
    }
    values[i] = value;
  }
  double get(int64_t i) const {
    if (tensor_.dtype.code == kDLInt) return reinterpret_cast<const int32_t*>(bytes_.data())[i];
    uint32_t bits = 0;
    if (tensor_.dtype.bits == 32) {
      std::memcpy(&bits, bytes_.data() + 4 * i, 4);
    } else {
      std::memcpy(reinterpret_cast<char*>(&bits) + 2, bytes_.data() + 2 * i, 2);
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  // Sixteenths between -1 and 1: exact in bf16.
  void fill(uint32_t seed) {
    for (size_t i = 0; i < values.size(); ++i) {
      seed = seed * 1664525u + 1013904223u;
      set(static_cast<int64_t>(i), static_cast<int>(seed >> 24) % 33 / 16.0 - 1.0);
    }
  }

  std::vector<double> values;

 private:
  std::vector<int64_t> shape_;
  std::vector<char> bytes_;
  DLTensor tensor_{};
};

void compare(const char* what, const Owned& got, const std::vector<double>& want, double tolerance) {
  for (size_t i = 0; i < want.size(); ++i) {
    const double value = got.get(static_cast<int64_t>(i));
    if (!(std::fabs(value - want[i]) <= tolerance * (1.0 + std::fabs(want[i])))) {
      std::fprintf(stderr, "%s: element %zu is %g, needs %g\n", what, i, value, want[i]);
      std::exit(1);
    }
  }
}

double silu(double x) {
  return x / (1.0 + std::exp(-x));
}

void check_linear(const Context& ctx, Type type, double tolerance) {
  constexpr int64_t kRows = 19, kIn = 83, kOut = 37;
  Owned x(type, {kRows, kIn}), w(type, {kOut, kIn}), y(kF32, {kRows, kOut});
  x.fill(1), w.fill(2);
  glm5::linear(ctx, x.view(), w.view(), std::nullopt, y.view());
  std::vector<double> want(kRows * kOut);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t o = 0; o < kOut; ++o) {
      for (int64_t k = 0; k < kIn; ++k) want[r * kOut + o] += x.values[r * kIn + k] * w.values[o * kIn + k];
    }
  }
  compare("linear", y, want, tolerance);
}

void check_rms_norm(const Context& ctx) {
  constexpr int64_t kRows = 3, kSize = 45;
  Owned x(kF32, {kRows, kSize}), w(kF32, {kSize}), y(kF32, {kRows, kSize});
  x.fill(3), w.fill(4);
  glm5::rms_norm(ctx, x.view(), w.view(), 1e-5, y.view());
  std::vector<double> want(kRows * kSize);
  for (int64_t r = 0; r < kRows; ++r) {
    double sum = 0;
    for (int64_t i = 0; i < kSize; ++i) sum += x.values[r * kSize + i] * x.values[r * kSize + i];
    for (int64_t i = 0; i < kSize; ++i) {
      want[r * kSize + i] = x.values[r * kSize + i] / std::sqrt(sum / kSize + 1e-5) * w.values[i];
    }
  }
  compare("rms_norm", y, want, 1e-5);
}

void check_attention(const Context& ctx, Type type, double tolerance) {
  constexpr int64_t kHeads = 3, kRow = 40, kValues = 24, kKeys = 70;
  Owned q(type, {1, kHeads, kRow}), cache(type, {kKeys, 1, kRow}), table(kI32, {1, kKeys}), request(kI32, {1});
  Owned chosen(kI32, {1, 1, kKeys}), out(type, {1, kHeads, kValues}), lse(kF32, {1, kHeads});
  q.fill(5), cache.fill(6), request.set(0, 0);
  for (int64_t j = 0; j < kKeys; ++j) table.set(j, kKeys - 1 - j), chosen.set(j, j);
  glm5::sparse_flash_attention(ctx, q.view(), cache.view(), table.view(), request.view(), chosen.view(), 0.125, kValues,
                               "plain", out.view(), lse.view());
  std::vector<double> want(kHeads * kValues), sums(kHeads);
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t j = 0; j < kKeys; ++j) {
      const double* key = cache.values.data() + (kKeys - 1 - j) * kRow;
      double score = 0;
      for (int64_t i = 0; i < kRow; ++i) score += q.values[h * kRow + i] * key[i];
      const double p = std::exp(score * 0.125);
      sums[h] += p;
      for (int64_t c = 0; c < kValues; ++c) want[h * kValues + c] += p * key[c];
    }
    for (int64_t c = 0; c < kValues; ++c) want[h * kValues + c] /= sums[h];
    sums[h] = std::log(sums[h]);
  }
  compare("sparse_flash_attention: out", out, want, tolerance);
  compare("sparse_flash_attention: lse", lse, sums, 1e-4);
}

void check_selection(const Context& ctx, Type type) {
  constexpr int64_t kHeads = 2, kSize = 33, kKeys = 200, kChosen = 9;
  Owned iq(type, {1, kHeads, kSize}), iw(kF32, {1, kHeads}), cache(type, {kKeys, 1, kSize}), table(kI32, {1, kKeys});
  Owned request(kI32, {1}), length(kI32, {1}), indices(kI32, {1, 1, kChosen});
  iq.fill(7), iw.fill(8), cache.fill(9), request.set(0, 0), length.set(0, kKeys);
  for (int64_t j = 0; j < kKeys; ++j) table.set(j, j);
  glm5::topk_indexer(ctx, iq.view(), iw.view(), cache.view(), table.view(), request.view(), length.view(), kChosen,
                     kKeys, "plain", 1 << 20, indices.view());
  std::vector<double> scores(kKeys), want;
  for (int64_t j = 0; j < kKeys; ++j) {
    for (int64_t h = 0; h < kHeads; ++h) {
      double product = 0;
      for (int64_t i = 0; i < kSize; ++i) product += iq.values[h * kSize + i] * cache.values[j * kSize + i];
      scores[j] += iw.values[h] * (product > 0 ? product : 0);
    }
  }
  for (int64_t j = 0; j < kKeys; ++j) {
    int64_t better = 0;
    for (int64_t i = 0; i < kKeys; ++i) better += scores[i] > scores[j] || (scores[i] == scores[j] && i < j);
    if (better < kChosen) want.push_back(static_cast<double>(j));
  }
  compare("topk_indexer", indices, want, 0);
}

void check_experts(const Context& ctx, Type type, double tolerance) {
  constexpr int64_t kRows = 5, kSize = 40, kInner = 21, kExperts = 3, kActive = 2;
  Owned x(type, {kRows, kSize}), ids(kI32, {kRows, kActive}), weights(kF32, {kRows, kActive});
  Owned up(type, {kExperts, 2 * kInner, kSize}), down(type, {kExperts, kSize, kInner}), y(type, {kRows, kSize});
  x.fill(10), weights.fill(11), up.fill(12), down.fill(13);
  for (int64_t i = 0; i < kRows; ++i) ids.set(2 * i, i % 2), ids.set(2 * i + 1, 2);
  glm5::moe_experts(ctx, x.view(), ids.view(), weights.view(), up.view(), down.view(), std::nullopt, y.view());
  std::vector<double> want(kRows * kSize), hidden(kInner);
  for (int64_t slot = 0; slot < kRows * kActive; ++slot) {
    const int64_t r = slot / kActive, e = static_cast<int64_t>(ids.values[slot]);
    auto product = [&](int64_t row) {
      double sum = 0;
      for (int64_t i = 0; i < kSize; ++i)
        sum += x.values[r * kSize + i] * up.values[(e * 2 * kInner + row) * kSize + i];
      return sum;
    };
    for (int64_t j = 0; j < kInner; ++j) hidden[j] = silu(product(j)) * product(kInner + j);
    for (int64_t o = 0; o < kSize; ++o) {
      double sum = 0;
      for (int64_t j = 0; j < kInner; ++j) sum += hidden[j] * down.values[(e * kSize + o) * kInner + j];
      want[r * kSize + o] += weights.values[slot] * sum;
    }
  }
  compare("moe_experts", y, want, tolerance);
}

}  // namespace

int main() {
  glm5::set_num_threads(2);
  const int most = static_cast<int>(glm5::cpu_level());
  for (int level = 0; level <= most; ++level) {
    const Context ctx{static_cast<glm5::Level>(level)};
    check_rms_norm(ctx);
    for (const Type type : {kF32, kBf16}) {
      const double tolerance = type.bits == 32 ? 1e-4 : 0.06;
      check_linear(ctx, type, 1e-5);
      check_attention(ctx, type, tolerance);
      check_selection(ctx, type);
      check_experts(ctx, type, tolerance);
    }
    std::printf("level %d of %d: right\n", level, most);
  }
  return 0;
}
