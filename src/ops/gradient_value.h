#pragma once

#include "ops/operator.h"

namespace tessera {

/// An operator that adds the gradient of one weight to its accumulator. Where that weight is a
/// value that another operator makes, such as a copy of what another rank holds, its gradient is a
/// value too.
class AccumulatesGradient {
 public:
  virtual ~AccumulatesGradient() = default;

  /// The operator that writes the same gradient, F32, as a value.
  virtual OperatorPtr with_value() const = 0;
  /// Its output that is the gradient.
  virtual int gradient_output() const { return 0; }
};

}  // namespace tessera
