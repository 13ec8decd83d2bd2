#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/build/weight_placement.h"

namespace tessera {

/// The numbers of rows of the matrices that a rank's part of a weight consists of, one below the
/// other; none where the weight is no matrix of a hidden layer. Throws UserError where the part
/// holds but a piece of a matrix, which Muon cannot update.
std::vector<int64_t> local_matrices(const std::string& name, const WeightPlacement& placement);

}  // namespace tessera
