#pragma once

#include <cstdint>
#include <span>

#include "model/build/ports.h"

namespace tessera {

// What layers are told of tokens' places in their sequences, beside positions.

/// Port::kChunkBounds: bounds of the chunks of `chunk` tokens, counted from each sequence's first,
/// of the sequences that `cu_seqlens` bounds. The rest of `bounds` is the last one again.
void fill_chunk_bounds(std::span<const int32_t> cu_seqlens, int64_t chunk,
                       std::span<int32_t> bounds);

/// How temperatures follow from positions (ModelConfig::temperature_scale).
struct Temperatures {
  double scale = 0;
  int64_t length = 1;

  explicit Temperatures(const ModelConfig& config)
      : scale(config.temperature_scale), length(config.temperature_length) {}
  Temperatures() = default;
  /// In F32, as transformers computes it.
  float at(int32_t position) const;
};

}  // namespace tessera
