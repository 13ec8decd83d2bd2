#pragma once

#include "ops/operator.h"

namespace tessera {

/// An operator that may also count what it sees, in an accumulator behind its other outputs.
class Tallies {
 public:
  virtual ~Tallies() = default;
  /// The same operator, which counts nothing: for who runs it again.
  virtual OperatorPtr without_tally() const = 0;
};

}  // namespace tessera
