#pragma once

#include <bit>
#include <cstring>

#include "ops/gemm/tile_registers.h"

namespace tessera::testing {

/// What tile::AmxTiles are, in plain arrays.
class PlainTiles {
 public:
  template <int kTile>
  void clear() {
    std::memset(words_[kTile], 0, sizeof(words_[kTile]));
  }
  template <int kTile, typename T>
  void load(const T* from, int64_t stride) {
    for (int64_t i = 0; i < tile::kTileRows; ++i)
      std::memcpy(words_[kTile][i], from + i * stride, sizeof(words_[kTile][i]));
  }
  template <int kTile>
  void store(float* to, int64_t stride) {
    for (int64_t i = 0; i < tile::kTileRows; ++i)
      std::memcpy(to + i * stride, words_[kTile][i], sizeof(words_[kTile][i]));
  }
  template <int kSum, int kA, int kB>
  void multiply() {
    for (int64_t i = 0; i < tile::kTileRows; ++i) {
      for (int64_t j = 0; j < tile::kTileWords; ++j) {
        auto sum = std::bit_cast<float>(words_[kSum][i][j]);
        for (int64_t k = 0; k < tile::kTileWords; ++k) {
          const tile::Word a = words_[kA][i][k];
          const tile::Word b = words_[kB][k][j];
          sum += low(a) * low(b) + high(a) * high(b);
        }
        words_[kSum][i][j] = std::bit_cast<tile::Word>(sum);
      }
    }
  }

 private:
  static float low(tile::Word word) { return std::bit_cast<float>(word << 16); }
  static float high(tile::Word word) { return std::bit_cast<float>(word & 0xFFFF0000U); }

  tile::Word words_[8][tile::kTileRows][tile::kTileWords];
};

}  // namespace tessera::testing
