// The tile registers of AMX: their shapes, and who owns them.
//
// Tile 0 to 3 are results, 4 and 5 hold rows of weights, 6 and 7 columns of activations.
#pragma once

#include "cpu/vec.h"

#if GLM5_LEVEL >= 5

namespace glm5::GLM5_LEVEL_NS {

constexpr int kTileHeight = 16;  // rows of a tile: outputs of a result, rows of weights
constexpr int kTileBytes = 64;   // of a row of weights: 32 bf16 or 64 int8
constexpr int kTileSize = 1024;  // bytes of a whole tile

// Gives this thread tiles whose activations and results have `columns` (1 to 16) columns, until the end of the scope.
class Tiles {
 public:
  explicit Tiles(int columns) {
    alignas(64) Shapes shapes{};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      const bool weights = tile == 4 || tile == 5;
      shapes.rows[tile] = kTileHeight;
      shapes.row_bytes[tile] = static_cast<uint16_t>(weights ? kTileBytes : 4 * columns);
    }
    // The intrinsic tells the compiler of eight bytes only; all 64 are read.
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  struct Shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(Shapes) == 64, "the processor's format");
};

}  // namespace glm5::GLM5_LEVEL_NS

#endif
