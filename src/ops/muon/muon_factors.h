#pragma once

#include <cstdint>

namespace tessera {

/// What one step of Muon multiplies by, worked out in double: the input `factors` of its operators.
/// As long as AdamWFactors, so that both may lie in one list.
struct alignas(16) MuonFactors {
  float decay;      ///< of the weight
  float step_size;  ///< of the orthogonalized momentum
  float new_m;      ///< what the gradient counts in the new average
  float averaged;   ///< what the average counts in what is orthogonalized; the gradient the rest
  uint32_t update;  ///< its number, for what is rounded stochastically
  uint32_t unused[3];
};

}  // namespace tessera
