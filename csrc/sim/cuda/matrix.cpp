#include "sim/cuda/matrix.h"

#include <cstring>

namespace glm5::sim {
namespace {

float value_of_bf16(uint32_t bits) {
  const uint32_t wide = bits << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// The fragments of all lanes as matrices and back. Elements lie E to a register, K = 8 E wide; lane 4 g + t holds rows
// g and g + 8 of A, column g of B, columns 2 t and 2 t + 1 of the sum. Sums go over ascending k.
template <class Sum, class Value, int E, class Convert>
void product(void** lanes, Convert convert) {
  constexpr int K = 8 * E, kBits = 32 / E;
  constexpr uint32_t kMask = (1u << kBits) - 1;
  Value a[16][K], b[K][8];
  Sum c[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto* p = static_cast<const Product<Sum>*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 4; ++r) {
      for (int e = 0; e < E; ++e)
        a[g + r % 2 * 8][t * E + r / 2 * 4 * E + e] = convert((p->a[r] >> (e * kBits)) & kMask);
    }
    for (int r = 0; r < 2; ++r) {
      for (int e = 0; e < E; ++e) b[t * E + r * 4 * E + e][g] = convert((p->b[r] >> (e * kBits)) & kMask);
    }
    for (int r = 0; r < 4; ++r) c[g + r / 2 * 8][2 * t + r % 2] = p->d[r];
  }
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < K; ++k) {
      for (int j = 0; j < 8; ++j) c[i][j] += a[i][k] * b[k][j];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    auto* p = static_cast<Product<Sum>*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 4; ++r) p->d[r] = c[g + r / 2 * 8][2 * t + r % 2];
  }
}

}  // namespace

float value_of_e4m3(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu, sign = static_cast<uint32_t>(code & 0x80u) << 24;
  uint32_t bits = (magnitude << 20) + (120u << 23);
  if (magnitude == 0x7fu) bits = 0x7fc00000u;
  float value = static_cast<float>(magnitude) * 0x1p-9f;
  if (magnitude >= 8u) std::memcpy(&value, &bits, sizeof value);
  std::memcpy(&bits, &value, sizeof bits);
  bits |= sign;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void load_matrices(void** lanes, int count, bool transposed) {
  for (int j = 0; j < count; ++j) {
    uint16_t m[8][8];
    for (int r = 0; r < 8; ++r) std::memcpy(m[r], static_cast<LoadMatrix*>(lanes[8 * j + r])->row, 16);
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4, column = 2 * (lane % 4);
      const uint32_t low = transposed ? m[column][row] : m[row][column];
      const uint32_t high = transposed ? m[column + 1][row] : m[row][column + 1];
      static_cast<LoadMatrix*>(lanes[lane])->to[j] = low | high << 16;
    }
  }
}

void product_bf16(void** lanes) {
  product<float, float, 2>(lanes, [](uint32_t bits) { return value_of_bf16(bits); });
}
void product_e4m3(void** lanes) {
  product<float, float, 4>(lanes, [](uint32_t bits) { return value_of_e4m3(static_cast<uint8_t>(bits)); });
}
void product_int8(void** lanes) {
  product<int, int, 4>(lanes, [](uint32_t bits) { return static_cast<int>(static_cast<int8_t>(bits)); });
}

}  // namespace glm5::sim
