// Each probe is one function compiled for its own instructions: this file is otherwise baseline code.
#include "glm5/probe.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>

#include "glm5/check.h"
#include "glm5/cpuid.h"
#include "glm5/thread_pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define GLM5_FOR(features) __attribute__((target(features), noinline))
#endif

namespace glm5 {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

constexpr int64_t kLine = 64;
constexpr int64_t kReadChunk = 1 << 20;  // bytes handed to a thread at once

// Operations of one probe call on one thread; the result keeps the optimiser from dropping the work.
struct Work {
  double operations;
  double value;
};

constexpr int kChains = 12;  // more than latency times throughput of any of these instructions

#if defined(__x86_64__)

// Lines of `p` summed by wide loads; the sum keeps the loads alive.
GLM5_FOR("avx512f") uint64_t read_avx512(const char* p, int64_t bytes) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 4 * kLine <= bytes; i += 4 * kLine) {
    a = _mm512_add_epi64(a, _mm512_loadu_si512(p + i));
    b = _mm512_add_epi64(b, _mm512_loadu_si512(p + i + kLine));
    c = _mm512_add_epi64(c, _mm512_loadu_si512(p + i + 2 * kLine));
    d = _mm512_add_epi64(d, _mm512_loadu_si512(p + i + 3 * kLine));
  }
  return static_cast<uint64_t>(
      _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d))));
}

GLM5_FOR("avx2") uint64_t read_avx2(const char* p, int64_t bytes) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (int64_t i = 0; i + 128 <= bytes; i += 128) {
    const auto* v = reinterpret_cast<const __m256i*>(p + i);
    a = _mm256_add_epi64(a, _mm256_loadu_si256(v));
    b = _mm256_add_epi64(b, _mm256_loadu_si256(v + 1));
    c = _mm256_add_epi64(c, _mm256_loadu_si256(v + 2));
    d = _mm256_add_epi64(d, _mm256_loadu_si256(v + 3));
  }
  alignas(32) uint64_t lanes[4];
  const __m256i sum = _mm256_add_epi64(_mm256_add_epi64(a, b), _mm256_add_epi64(c, d));
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

GLM5_FOR("sse2") Work f32_sse(int64_t n) {
  __m128 acc[kChains], x = _mm_set1_ps(0.999f), y = _mm_set1_ps(1e-3f);
  for (auto& a : acc) a = _mm_set1_ps(2.0f);
  for (int64_t i = 0; i < n; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = _mm_add_ps(_mm_mul_ps(acc[c], x), y);
  }
  double sum = 0;
  for (auto& a : acc) sum += _mm_cvtss_f32(a);
  return {2.0 * 4 * kChains * static_cast<double>(n), sum};
}

GLM5_FOR("avx2,fma") Work f32_avx2(int64_t n) {
  __m256 acc[kChains], x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(1e-3f);
  for (auto& a : acc) a = _mm256_set1_ps(2.0f);
  for (int64_t i = 0; i < n; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = _mm256_fmadd_ps(acc[c], x, y);
  }
  double sum = 0;
  for (auto& a : acc) sum += _mm256_cvtss_f32(a);
  return {2.0 * 8 * kChains * static_cast<double>(n), sum};
}

GLM5_FOR("avx512f") Work f32_avx512(int64_t n) {
  __m512 acc[kChains], x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(1e-3f);
  for (auto& a : acc) a = _mm512_set1_ps(2.0f);
  for (int64_t i = 0; i < n; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = _mm512_fmadd_ps(acc[c], x, y);
  }
  double sum = 0;
  for (auto& a : acc) sum += _mm512_cvtss_f32(a);
  return {2.0 * 16 * kChains * static_cast<double>(n), sum};
}

GLM5_FOR("avx512f,avx512bf16") Work bf16_avx512(int64_t n) {
  __m512 acc[kChains];
  for (auto& a : acc) a = _mm512_setzero_ps();
  const __m512bh x = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.5f));
  for (int64_t i = 0; i < n; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = _mm512_dpbf16_ps(acc[c], x, x);
  }
  double sum = 0;
  for (auto& a : acc) sum += _mm512_cvtss_f32(a);
  return {2.0 * 32 * kChains * static_cast<double>(n), sum};
}

GLM5_FOR("avx512f,avx512vnni") Work int8_vnni(int64_t n) {
  __m512i acc[kChains];
  for (auto& a : acc) a = _mm512_setzero_si512();
  const __m512i x = _mm512_set1_epi8(1);
  for (int64_t i = 0; i < n; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = _mm512_dpbusd_epi32(acc[c], x, x);
  }
  double sum = 0;
  for (auto& a : acc) sum += _mm_cvtsi128_si32(_mm512_castsi512_si128(a));
  return {2.0 * 64 * kChains * static_cast<double>(n), sum};
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Four accumulators, two tiles of each operand: the shape of a real kernel, without its loads.
// Tile numbers are part of the instruction: they cannot be variables, nor arguments of a function.
#define GLM5_TILE_PROBE(product, type, out)                                                 \
  TileConfig config;                                                                        \
  for (int t = 0; t < 8; ++t) config.bytes_per_row[t] = 64, config.rows[t] = 16;            \
  __asm__ volatile("" : : "r"(&config) : "memory"); /* the intrinsic hides what it reads */ \
  _tile_loadconfig(&config);                                                                \
  _tile_zero(0);                                                                            \
  _tile_zero(1);                                                                            \
  _tile_zero(2);                                                                            \
  _tile_zero(3);                                                                            \
  _tile_zero(4);                                                                            \
  _tile_zero(5);                                                                            \
  _tile_zero(6);                                                                            \
  _tile_zero(7);                                                                            \
  for (int64_t i = 0; i < n; ++i) {                                                         \
    product(0, 4, 6);                                                                       \
    product(1, 4, 7);                                                                       \
    product(2, 5, 6);                                                                       \
    product(3, 5, 7);                                                                       \
  }                                                                                         \
  alignas(64) type out[256];                                                                \
  _tile_stored(0, out, 64);                                                                 \
  _tile_release();

GLM5_FOR("amx-tile,amx-bf16") Work bf16_amx(int64_t n) {
  GLM5_TILE_PROBE(_tile_dpbf16ps, float, out)
  return {2.0 * 16 * 16 * 32 * 4 * static_cast<double>(n), out[0]};
}

GLM5_FOR("amx-tile,amx-int8") Work int8_amx(int64_t n) {
  GLM5_TILE_PROBE(_tile_dpbssd, int32_t, out)
  return {2.0 * 16 * 16 * 64 * 4 * static_cast<double>(n), static_cast<double>(out[0])};
}

uint64_t read_lines(const char* p, int64_t bytes) {
  return cpu_level() >= Level::avx512 ? read_avx512(p, bytes) : read_avx2(p, bytes);
}

bool has_avx2() {
  return cpu_level() >= Level::avx2;
}

using Probe = Work (*)(int64_t);

Probe find(Level level, Product product) {
  if (product == Product::f32) return level >= Level::avx512 ? f32_avx512 : level == Level::avx2 ? f32_avx2 : f32_sse;
  if (product == Product::bf16) {
    return level == Level::amx ? bf16_amx : level == Level::avx512_bf16 ? bf16_avx512 : nullptr;
  }
  return level == Level::amx ? int8_amx : level >= Level::avx512_vnni ? int8_vnni : nullptr;
}

#else

using Probe = Work (*)(int64_t);

bool has_avx2() {
  return false;
}

uint64_t read_lines(const char*, int64_t) {
  return 0;
}

Work f32_plain(int64_t n) {
  float acc[4 * kChains];
  for (auto& a : acc) a = 2.0f;
  for (int64_t i = 0; i < n; ++i) {
    for (auto& a : acc) a = a * 0.999f + 1e-3f;
  }
  double sum = 0;
  for (auto& a : acc) sum += a;
  return {2.0 * 4 * kChains * static_cast<double>(n), sum};
}

Probe find(Level, Product product) {
  return product == Product::f32 ? f32_plain : nullptr;
}

#endif

uint64_t read_words(const char* p, int64_t bytes) {
  uint64_t sums[8] = {};
  for (int64_t i = 0; i + kLine <= bytes; i += kLine) {
    for (int w = 0; w < 8; ++w) {
      uint64_t word;
      std::memcpy(&word, p + i + 8 * w, sizeof word);
      sums[w] += word;
    }
  }
  uint64_t sum = 0;
  for (uint64_t s : sums) sum += s;
  return sum;
}

volatile double sink;

}  // namespace

double probe_read(int64_t bytes, int repeats) {
  if (bytes < 1) fail("probe_read: bytes is %lld, needs 1 or more", static_cast<long long>(bytes));
  if (repeats < 1) fail("probe_read: repeats is %d, needs 1 or more", repeats);
  const int64_t chunks = std::max<int64_t>(1, bytes / kReadChunk);
  std::unique_ptr<char[]> buffer(new char[chunks * kReadChunk]);
  char* data = buffer.get();
  parallel_for(chunks, 1, [&](int64_t begin, int64_t end) {
    std::memset(data + begin * kReadChunk, 1, (end - begin) * kReadChunk);
  });
  double best = 0;
  for (int r = 0; r < repeats; ++r) {
    const double start = now();
    parallel_for(chunks, 1, [&](int64_t begin, int64_t end) {
      const char* p = data + begin * kReadChunk;
      const int64_t size = (end - begin) * kReadChunk;
      sink = static_cast<double>(has_avx2() ? read_lines(p, size) : read_words(p, size));
    });
    best = std::max(best, static_cast<double>(chunks * kReadChunk) / (now() - start));
  }
  return best;
}

double probe_product(Level level, Product product, double seconds) {
  if (level > cpu_level() || level < Level::baseline) {
    fail("probe_product: level is %d, needs 0 to %d on this processor", static_cast<int>(level),
         static_cast<int>(cpu_level()));
  }
  if (!(seconds > 0)) fail("probe_product: seconds is %f, needs more than 0", seconds);
  const Probe probe = find(level, product);
  if (probe == nullptr) return 0;
  const int threads = get_num_threads();
  int64_t n = 1 << 14;
  double best = 0;
  for (double end = now() + seconds; now() < end;) {
    const double start = now();
    double operations = 0;
    // As many equal parts as threads would leave some idle when one wakes late: a few more even that out.
    const int64_t parts = threads > 1 ? 8 * threads : 1;
    parallel_for(parts, 1, [&](int64_t first, int64_t last) {
      for (int64_t p = first; p < last; ++p) sink = probe(n).value;
    });
    operations = probe(1).operations * static_cast<double>(n * parts);
    const double took = now() - start;
    best = std::max(best, operations / took);
    if (took < 2e-3) n *= 2;  // shorter would measure how threads wake
  }
  return best;
}

}  // namespace glm5
