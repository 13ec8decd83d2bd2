#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

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
  /// Of matrices that map hidden states to hidden states, or to what lies between: the numbers of
  /// rows of those that the whole weight consists of, one below the other. Muon updates each for
  /// itself. Empty for all else: embedding, head, norms, biases, gates.
  std::vector<int64_t> matrix_rows = {};
  /// Training leaves it as it is: it has no gradient and no optimizer's state.
  bool frozen = false;
};

/// By the names of a program's weights.
using WeightPlacements = std::map<std::string, WeightPlacement>;

}  // namespace tessera
