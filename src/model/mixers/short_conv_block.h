#pragma once

#include "model/build/layer_builder.h"

namespace tessera {

/// A short convolution of the channels of heads side by side.
struct ShortConvBlock {
  std::string weight;     ///< "<weight>.weight" [N·D, taps] and, where biased, "<weight>.bias"
  int64_t num_heads = 1;  ///< N, of all tensor-parallel ranks
  int64_t head_size = 1;  ///< D
  int64_t taps = 1;
  bool biased = false;
  bool silu = true;
  Port state = Port::kValueConvState;  ///< with a cache: of the last inputs
};

/// x A [T_g, ...], the heads of the tensor-parallel rank, to A `result`: those convolved that
/// sequence_heads names, of all tokens.
ValueId build_short_conv(LayerBuilder& builder, const ShortConvBlock& block, ValueId x,
                         const std::string& result);

}  // namespace tessera
