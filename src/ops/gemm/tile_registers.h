#pragma once

#include <cstdint>

#include "ops/gemm/words.h"

/// The tile registers of AMX: eight of 16 rows of 64 bytes, multiplied as words of two BF16 (Intel,
/// Software Developer's Manual, volume 1, chapter 18). In assembly, so that sources need no level
/// of their own: nothing here may run unless may_use_tiles().
namespace tessera::tile {

/// Rows of a register, and words in each.
inline constexpr int64_t kTileRows = 16;
inline constexpr int64_t kTileWords = 16;
inline constexpr int64_t kTileSize = kTileRows * kTileWords;

/// This thread's tile registers for as long as the object lives. All of them have all their rows;
/// strides are in words.
class AmxTiles {
 public:
  AmxTiles() {
    constexpr int kRegisters = 8;
    alignas(64) Configuration configuration;
    for (int i = 0; i < kRegisters; ++i) {
      configuration.row_bytes[i] = kTileWords * sizeof(Word);
      configuration.rows[i] = kTileRows;
    }
    asm volatile("ldtilecfg %0" : : "m"(configuration));
  }
  ~AmxTiles() { asm volatile("tilerelease"); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

  template <int kTile>
  void clear() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile, typename T>
  void load(const T* from, int64_t stride) {
    static_assert(sizeof(T) == sizeof(Word));
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
                 :
                 : "r"(from), "r"(stride * int64_t{sizeof(Word)}), "i"(kTile)
                 : "memory");
  }
  template <int kTile>
  void store(float* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
                 :
                 : "r"(to), "r"(stride * int64_t{sizeof(float)}), "i"(kTile)
                 : "memory");
  }
  /// sum[i, j] += Σ over words k and both halves of a[i, k] · b[k, j], in F32.
  template <int kSum, int kA, int kB>
  void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
  }

 private:
  struct Configuration {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
  static_assert(sizeof(Configuration) == 64);
};

/// sum of 2 × 2 tiles, registers 0 to 3, += tiles of A times tiles of B over `steps` tiles of the
/// summed dim. next(step) gives addresses: a[2], b[2] and the strides of their rows.
template <typename Tiles, typename Next>
inline __attribute__((always_inline)) void multiply_four(Tiles& tiles, int64_t steps,
                                                         const Next& next) {
  for (int64_t step = 0; step < steps; ++step) {
    const auto operands = next(step);
    tiles.template load<4>(operands.a[0], operands.a_stride);
    tiles.template load<6>(operands.b[0], operands.b_stride);
    tiles.template multiply<0, 4, 6>();
    tiles.template load<7>(operands.b[1], operands.b_stride);
    tiles.template multiply<1, 4, 7>();
    tiles.template load<5>(operands.a[1], operands.a_stride);
    tiles.template multiply<2, 5, 6>();
    tiles.template multiply<3, 5, 7>();
  }
}

/// Loads or clears the four sums; stores them. `c` is the place of 32 × 32 floats.
template <typename Tiles>
void begin_four(Tiles& tiles, const float* c, int64_t ldc, bool accumulate) {
  if (!accumulate) {
    tiles.template clear<0>();
    tiles.template clear<1>();
    tiles.template clear<2>();
    tiles.template clear<3>();
    return;
  }
  tiles.template load<0>(c, ldc);
  tiles.template load<1>(c + kTileWords, ldc);
  tiles.template load<2>(c + kTileRows * ldc, ldc);
  tiles.template load<3>(c + kTileRows * ldc + kTileWords, ldc);
}

template <typename Tiles>
void end_four(Tiles& tiles, float* c, int64_t ldc) {
  tiles.template store<0>(c, ldc);
  tiles.template store<1>(c + kTileWords, ldc);
  tiles.template store<2>(c + kTileRows * ldc, ldc);
  tiles.template store<3>(c + kTileRows * ldc + kTileWords, ldc);
}

}  // namespace tessera::tile
