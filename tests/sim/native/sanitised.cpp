// Runs the simulator and the CUDA kernels without Python, for builds with sanitizers: the self-tests in their right
// form, and each kernel on ragged inputs. Prints a line for each; ends with 1 when one broke a rule.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "glm5/ops/rms_norm.h"
#include "glm5/ops/sparse_flash_attention.h"
#include "glm5/ops/topk_indexer_with_scores.h"
#include "sim/cuda/guarded.h"
#include "sim/cuda/selftest/selftest.h"
#include "sim/cuda/settings.h"

namespace {

using glm5::TensorView;
namespace sim = glm5::sim;

std::mt19937 generator(1);

// Memory and shape of one tensor.
struct Tensor {
  std::vector<int64_t> shape;
  std::vector<unsigned char> bytes;
  DLDataType dtype;
  int64_t count() const {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    return n;
  }
  Tensor(std::vector<int64_t> shape_, int code, int bits)
      : shape(std::move(shape_)), dtype{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1} {
    bytes.assign(static_cast<size_t>(count() * bits / 8), 0);
  }
  TensorView view() {
    DLTensor raw{};
    raw.data = bytes.data();
    raw.device = {kDLCPU, 0};
    raw.ndim = static_cast<int>(shape.size());
    raw.dtype = dtype;
    raw.shape = shape.data();
    return TensorView(raw, false);
  }
};

Tensor bf16(std::vector<int64_t> shape) {
  Tensor t(std::move(shape), kDLBfloat, 16);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < t.count(); ++i) {
    const float value = normal(generator);
    std::memcpy(&t.bytes[static_cast<size_t>(i) * 2], reinterpret_cast<const char*>(&value) + 2, 2);
  }
  return t;
}
Tensor f32(std::vector<int64_t> shape) {
  Tensor t(std::move(shape), kDLFloat, 32);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < t.count(); ++i) reinterpret_cast<float*>(t.bytes.data())[i] = normal(generator);
  return t;
}
template <class F>
Tensor i32(std::vector<int64_t> shape, const F& value) {
  Tensor t(std::move(shape), kDLInt, 32);
  for (int64_t i = 0; i < t.count(); ++i) reinterpret_cast<int32_t*>(t.bytes.data())[i] = value(static_cast<int>(i));
  return t;
}

void kernels(bool wide) {
  const glm5::Context ctx;
  const int64_t latent = wide ? 512 : 20, rope = wide ? 64 : 6, size = 7;
  Tensor x = wide ? bf16({2, 6144}) : f32({2, 63}), weight = wide ? bf16({6144}) : f32({63}), y = x;
  glm5::rms_norm(ctx, x.view(), weight.view(), 1e-5, y.view());
  Tensor q = bf16({2, 18, latent + rope}), out = bf16({2, 18, latent}), lse = f32({2, 18});
  Tensor cache = bf16({20, size, latent + rope});
  Tensor table = i32({2, 10}, [](int i) { return 19 - i; });
  Tensor requests = i32({2}, [](int i) { return i - 1; });
  Tensor chosen = i32({2, 1, 80}, [](int i) { return i % 80 < 69 ? i % 80 : -1; });
  glm5::sparse_flash_attention(ctx, q.view(), cache.view(), table.view(), requests.view(), chosen.view(), 0.1, latent,
                               "plain", out.view(), lse.view());
  Tensor bytes({20, size, latent + 4 * ((latent + 127) / 128) + 2 * rope}, kDLUInt, 8);
  glm5::sparse_flash_attention(ctx, q.view(), bytes.view(), table.view(), requests.view(), chosen.view(), 0.1, latent,
                               "fp8_ds_mla", out.view(), lse.view());
  const int64_t dim = wide ? 128 : 5;
  Tensor iq = bf16({2, 18, dim}), iw = f32({2, 18}), keys = bf16({20, size, dim});
  Tensor lengths = i32({2}, [](int) { return 69; });
  Tensor indices = i32({2, 1, 30}, [](int) { return 0; }), scores = f32({2, 1, 30});
  glm5::topk_indexer_with_scores(ctx, iq.view(), iw.view(), keys.view(), table.view(), requests.view(), lengths.view(),
                                 30, 70, "plain", 0, indices.view(), scores.view());
}

}  // namespace

int main() {
  int failed = 0;
  for (const char* settings : {"order=fifo,copies=late", "order=random,copies=random,seed=3"}) {
    sim::configure(sim::parse_settings(settings));
    const auto attempt = [&](const char* name, const auto& run) {
      try {
        run();
        std::printf("%s: %s passed\n", settings, name);
      } catch (const std::exception& error) {
        std::printf("%s: %s: %s\n", settings, name, error.what());
        failed = 1;
      }
    };
    Tensor in = bf16({64, 64}), out = f32({64, 64});
    for (const auto& tests : {sim::memory_selftests(), sim::warp_selftests(), sim::hopper_selftests()}) {
      for (const sim::SelfTest& test : tests) {
        attempt(test.name, [&] {
          test.run(false, reinterpret_cast<const unsigned short*>(in.bytes.data()),
                   reinterpret_cast<float*>(out.bytes.data()));
        });
      }
    }
    attempt("kernels at GLM-5's sizes", [] { kernels(true); });
    attempt("kernels at odd sizes", [] { kernels(false); });
  }
  return failed;
}
