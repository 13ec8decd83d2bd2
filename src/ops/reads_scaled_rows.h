#pragma once

#include "ops/operator.h"

namespace tessera {

/// How an operator reads rows.
enum class RowFormat : uint8_t {
  kValues,  ///< F32 or BF16
  kScaled,  ///< E4M3 with scales of single rows or of parts of them (ops/scaled_rows.h)
};

/// An operator that may read rows in FP8 instead of their values, so that these can be kept so: a
/// pass that has them kept needs to know no more of it (program/compile/quantize_saved.h).
class ReadsScaledRows {
 public:
  virtual ~ReadsScaledRows() = default;

  /// The operator whose input `input` is E4M3 with scales of its rows, and which gives what this
  /// one gives of the values that they stand for (ops/dequantize/dequantize.h), to the bit. Null
  /// where there is none.
  virtual OperatorPtr reading_scaled_rows(int input) const = 0;
};

}  // namespace tessera
