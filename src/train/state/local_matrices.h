#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/build/weight_placement.h"
#include "optim/muon_kind.h"

namespace tessera {

/// The matrices that a rank's part of a weight consists of, or has parts of.
struct LocalMatrices {
  /// The numbers of rows of these, or of these parts, one below the other; none where the weight is
  /// no matrix of a hidden layer.
  std::vector<int64_t> rows;
  MatrixCut cut = {};
};

/// `parts` are the ranks that may hold the rest of matrices which are cut. Throws UserError where
/// the parts of a matrix are not equal, one for each of these ranks in their order.
LocalMatrices local_matrices(const std::string& name, const WeightPlacement& placement,
                             const CommunicatorPtr& parts);

}  // namespace tessera
