#pragma once

#include "ops/operator.h"

namespace tessera {

/// Which gathers the operators that read their rows make themselves
/// (program/fusion/fuse_gathers.h).
enum class GatherFusion : uint8_t {
  kAuto,    ///< where that pays on the device; never on the host
  kAlways,  ///< wherever the readers can
  kNever,
};

/// An operator (x [T, H], source_R, row_of_TK) -> [R, H] whose rows are those of x that source_R
/// names, or zeros, as Permute makes them: readers that know source_R need no copy of them.
class GathersRows {
 public:
  virtual ~GathersRows() = default;
};

/// An operator that can gather rows as it reads them: a pass that finds a gather in front of it
/// needs to know no more of it (program/fusion/fuse_gathers.h).
class TakesGather {
 public:
  virtual ~TakesGather() = default;

  /// The operator that takes x in place of input `input`, whose rows a GathersRows makes of it, and
  /// two inputs more, after all others: source_R and row_of_TK. It gives the same bits. Null where
  /// it cannot be, or where this operator gathers already.
  virtual OperatorPtr with_gather(int input) const = 0;
  /// The time that this adds on a GPU to reading rows that are made, for inputs of these types, the
  /// rows among them: as the bytes that a copying operator moves in it (Cost::bytes).
  virtual double gather_cost(std::span<const ValueType> inputs) const = 0;
  /// The same for the operators of its gradient that read those rows: for these it makes the rows
  /// (a GathersRows), which they may gather too.
  virtual double gradient_gather_cost(std::span<const ValueType> inputs) const = 0;
};

}  // namespace tessera
