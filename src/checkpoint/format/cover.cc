#include "checkpoint/format/cover.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

namespace tessera {
namespace {

using Pieces = std::vector<const TensorPiece*>;

Pieces non_empty(std::span<const TensorPiece> pieces) {
  Pieces result;
  for (const TensorPiece& piece : pieces) {
    if (piece.rectangle.shape.num_elements() > 0) result.push_back(&piece);
  }
  return result;
}

std::string describe(const TensorPiece& piece) {
  return fmt::format("{} of shape {} in {}", piece.rectangle.offset.to_string(),
                     piece.rectangle.shape.to_string(), piece.file);
}

/// REQUIRES rank 1 or more: the sweep goes along the first dim.
std::string overlap_defect(Pieces pieces) {
  const auto begin = [](const TensorPiece* piece) { return piece->rectangle.offset[0]; };
  std::ranges::stable_sort(pieces, {}, begin);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const int64_t end = begin(pieces[i]) + pieces[i]->rectangle.shape[0];
    for (size_t j = i + 1; j < pieces.size() && begin(pieces[j]) < end; ++j) {
      if (!intersect(pieces[i]->rectangle, pieces[j]->rectangle)) continue;
      return fmt::format("the pieces at {} and at {} overlap", describe(*pieces[i]),
                         describe(*pieces[j]));
    }
  }
  return "";
}

/// Finds a hole in the dims from `dim` on; `pieces` hold the index chosen for those before.
bool find_hole_from(const Shape& global, const Pieces& pieces, int dim, Shape& hole) {
  if (dim == global.rank()) return pieces.empty();
  const auto begin = [dim](const TensorPiece* piece) { return piece->rectangle.offset[dim]; };
  const auto end = [dim](const TensorPiece* piece) {
    return piece->rectangle.offset[dim] + piece->rectangle.shape[dim];
  };
  // Which pieces hold an index changes only where one ends or begins, and a hole's first index is
  // where one ends, or 0.
  std::vector<int64_t> candidates = {0};
  for (const TensorPiece* piece : pieces) candidates.push_back(end(piece));
  std::ranges::sort(candidates);
  candidates.erase(std::unique(candidates.begin(), candidates.end()), candidates.end());
  for (const int64_t index : candidates) {
    if (index == global[dim]) break;
    Pieces holding = pieces;
    std::erase_if(holding, [&](const TensorPiece* piece) {
      return index < begin(piece) || index >= end(piece);
    });
    hole[dim] = index;
    if (find_hole_from(global, holding, dim + 1, hole)) return true;
  }
  return false;
}

}  // namespace

std::string cover_defect(const Shape& global, std::span<const TensorPiece> pieces) {
  const Pieces filled = non_empty(pieces);
  if (global.rank() == 0) {
    if (filled.size() > 1) return fmt::format("{} pieces hold its one element", filled.size());
  } else if (std::string overlap = overlap_defect(filled); !overlap.empty()) {
    return overlap;
  }
  // Disjoint pieces within the tensor: the sum cannot overflow.
  int64_t covered = 0;
  for (const TensorPiece* piece : filled) covered += piece->rectangle.shape.num_elements();
  if (covered == global.num_elements()) return "";
  return fmt::format("its pieces hold {} of {} elements", covered, global.num_elements());
}

std::optional<Shape> find_hole(const Shape& global, std::span<const TensorPiece> pieces) {
  if (global.num_elements() == 0) return std::nullopt;
  Shape hole = global;
  if (!find_hole_from(global, non_empty(pieces), 0, hole)) return std::nullopt;
  return hole;
}

}  // namespace tessera
