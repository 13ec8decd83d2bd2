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

/// Parts of 128 columns of a row that share a scale, as E4M3.
inline bool has_short_blocks(const QuantizeSpec& spec) {
  return spec.element == DType::kE4M3 && spec.scale == ScaleLayout::block(1, 128) &&
         spec.turned_rows == 0;
}

}  // namespace tessera
