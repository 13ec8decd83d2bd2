#pragma once

#include "ops/operator.h"

namespace tessera {

/// Which gathers the operators that read their rows make themselves (program/fuse_gathers.h).
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
/// needs to know no more of it (program/fuse_gathers.h).
class TakesGather {
 public:
  virtual ~TakesGather() = default;

  /// The operator that takes x in place of input `input`, whose rows a GathersRows makes of it, and
  /// two inputs more, after all others: source_R and row_of_TK. It gives the same bits. Null where
  /// it cannot be, or where this operator gathers already.
  virtual OperatorPtr with_gather(int input) const = 0;
  /// Whether that takes less time on a GPU than making the rows and reading them, for inputs of
  /// these types, the rows among them.
  virtual bool gather_pays(std::span<const ValueType> inputs) const = 0;
};

}  // namespace tessera
