#pragma once

#include "ops/quantize/quantize.h"

namespace tessera {

/// An operator that could quantize one of its results while it has it at hand.
class GivesQuantized {
 public:
  virtual ~GivesQuantized() = default;

  /// The operator that, after its own outputs, gives what `quantize` makes of the output at
  /// position `output`; the same bits. Null where there is none.
  virtual OperatorPtr giving_quantized(int output, const Quantize& quantize) const = 0;
};

/// E4M3 of which parts of 128 columns of a row share a scale.
inline constexpr int64_t kShortBlock = 128;
inline QuantizeSpec short_blocks() {
  return {.element = DType::kE4M3, .scale = ScaleLayout::block(1, kShortBlock)};
}
inline bool has_short_blocks(const QuantizeSpec& spec) {
  const QuantizeSpec short_ones = short_blocks();
  return spec.element == short_ones.element && spec.scale == short_ones.scale &&
         spec.turned_rows == 0;
}

}  // namespace tessera
