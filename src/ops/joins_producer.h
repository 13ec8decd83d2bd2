#pragma once

#include "ops/operator.h"

namespace tessera {

/// Two nodes of a program that follow one another: the producer makes the first input of the
/// reader.
struct Neighbours {
  const Operator& producer;
  std::span<const ValueId> producer_inputs;
  std::span<const ValueId> reader_inputs;
};

/// An operator that can be computed together with the one that makes its first input, so that this
/// is not read from memory again, or is not made at all: a pass that finds the two needs to know no
/// more of them (program/fusion/fuse_producers.h).
class JoinsProducer {
 public:
  virtual ~JoinsProducer() = default;

  /// The operator that does the work of both: it takes what the producer takes, then this one's
  /// inputs but the first, and gives what this one gives and then, with `keeps_product`, what the
  /// producer gives. The same bits, except for sums over columns, whose order may differ. Null
  /// where there is none.
  virtual OperatorPtr joined_with(const Neighbours& nodes, bool keeps_product) const = 0;
};

/// An operator that could compute on the way what others compute of its inputs.
class GivesMore {
 public:
  virtual ~GivesMore() = default;

  /// The operator that, after its own outputs, gives those of `other`, whose inputs are the values
  /// `other_inputs` and its own `inputs`; the same bits. Null where there is none.
  virtual OperatorPtr giving_also(std::span<const ValueId> inputs, const Operator& other,
                                  std::span<const ValueId> other_inputs) const = 0;
};

}  // namespace tessera
