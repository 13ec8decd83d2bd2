#pragma once

#include <map>
#include <string>

#include "core/slice.h"

namespace tessera {

/// Where a weight of a program lies: the part of the whole that this rank holds, and which other
/// ranks of its stage hold the same part.
struct WeightPlacement {
  Slice slice;
  /// Held along EDP, by the factoring of the experts; otherwise along CP · DP, and in runs of
  /// `tp_copies` neighbours along TP.
  bool expert = false;
  int64_t tp_copies = 1;
};

/// By the names of a program's weights.
using WeightPlacements = std::map<std::string, WeightPlacement>;

}  // namespace tessera
