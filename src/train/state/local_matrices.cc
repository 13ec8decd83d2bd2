#include "train/state/local_matrices.h"

#include <algorithm>

#include "core/error.h"

namespace tessera {
namespace {

void require_whole(bool whole, const std::string& name) {
  require(
      whole,
      "optim.name = \"muon\" updates whole matrices, but parallel.tp or parallel.etp cuts those "
      "of '{}'; set both to 1 and spread the model by parallel.ep, parallel.pp or optim.shard, "
      "or set optim.name = \"adamw\"",
      name);
}

}  // namespace

std::vector<int64_t> local_matrices(const std::string& name, const WeightPlacement& placement) {
  std::vector<int64_t> local;
  if (placement.matrix_rows.empty()) return local;
  const Slice& slice = placement.slice;
  require_whole(slice.columns.count == slice.global[1], name);
  for (const IndexRange& range : slice.rows) {
    IndexRange matrix;
    int64_t found = 0;
    for (const int64_t rows : placement.matrix_rows) {
      matrix = {matrix.end(), rows};
      if (matrix.begin < range.begin || matrix.end() > range.end()) continue;
      local.push_back(rows);
      found += rows;
    }
    require_whole(found == range.count, name);
  }
  return local;
}

}  // namespace tessera
