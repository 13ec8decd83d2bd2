#pragma once

#include "ops/operator.h"

namespace tessera {

/// An operator that can add one more value to its first output: a pass that finds such a sum needs
/// to know no more of it (program/fusion/fuse_sums.h).
class TakesAddend {
 public:
  virtual ~TakesAddend() = default;

  /// The operator that takes one input more, after all others and of the first output's type, and
  /// adds it to the first output in F32, before that is rounded. Null where it cannot be for inputs
  /// of these types, or where this operator does so already.
  virtual OperatorPtr with_addend(std::span<const ValueType> inputs) const = 0;
};

/// Throws UserError unless `addend` has the type of the output that it is added to.
inline void check_addend(const Operator& op, const ValueType& addend, const ValueType& output) {
  check_shape(op, addend == output, "the addend must be {} as the result is, got {}",
              output.to_string(), addend.to_string());
}

}  // namespace tessera
