#include "train/state/local_matrices.h"

#include <algorithm>

#include "core/error.h"

namespace tessera {
namespace {

/// Whether `part` is this rank's of as many equal parts of `whole` as there are ranks.
bool is_own_part(const IndexRange& part, const IndexRange& whole, const Communicator& parts) {
  return part.count * parts.size() == whole.count &&
         part.begin == whole.begin + parts.rank() * part.count;
}

/// What a range of rows consists of.
struct Pieces {
  std::vector<int64_t> rows;
  bool cut = false;   ///< one piece of a matrix, which is this rank's part of it
  bool fits = false;  ///< or whole matrices
};

Pieces find_pieces(const IndexRange& range, const std::vector<int64_t>& matrix_rows,
                   const Communicator& parts) {
  Pieces pieces;
  IndexRange matrix;
  int64_t found = 0;
  for (const int64_t rows : matrix_rows) {
    matrix = {matrix.end(), rows};
    if (matrix.begin >= range.begin && matrix.end() <= range.end()) {
      pieces.rows.push_back(rows);
      found += rows;
    } else if (matrix.begin <= range.begin && range.end() <= matrix.end() && range.count > 0) {
      return {.rows = {range.count}, .cut = true, .fits = is_own_part(range, matrix, parts)};
    }
  }
  pieces.fits = found == range.count;
  return pieces;
}

void require_parts(bool fits, const std::string& name, const Slice& slice, int64_t num_parts) {
  require(
      fits,
      "optim.name = \"muon\" updates whole matrices, and joins them where parallel.tp or "
      "parallel.etp cuts them into equal parts, but this rank's part of '{}' ({}) is not one of "
      "{} equal ones; set both to 1 and spread the model by parallel.ep, parallel.pp or "
      "optim.shard, or set optim.name = \"adamw\"",
      name, slice.to_string(), num_parts);
}

}  // namespace

LocalMatrices local_matrices(const std::string& name, const WeightPlacement& placement,
                             const CommunicatorPtr& parts) {
  LocalMatrices local;
  if (placement.matrix_rows.empty()) return local;
  const Slice& slice = placement.slice;
  const IndexRange all_columns = {0, slice.global[1]};
  const bool cut_columns = slice.columns != all_columns;
  bool fits = !cut_columns || is_own_part(slice.columns, all_columns, *parts);
  int64_t num_cut = 0;
  for (const IndexRange& range : slice.rows) {
    const Pieces pieces = find_pieces(range, placement.matrix_rows, *parts);
    local.rows.insert(local.rows.end(), pieces.rows.begin(), pieces.rows.end());
    fits = fits && pieces.fits;
    num_cut += pieces.cut ? 1 : 0;
  }
  // All are cut alike.
  fits = fits && (num_cut == 0 || (num_cut == std::ssize(local.rows) && !cut_columns));
  require_parts(fits, name, slice, parts->size());
  if (cut_columns || num_cut > 0) local.cut = {.parts = parts, .by_columns = cut_columns};
  return local;
}

}  // namespace tessera
