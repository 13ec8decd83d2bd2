#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "core/host_device.h"

/// How the grouped products on tensor cores cut experts' rows into tiles: shared by the kernels and
/// by the prediction of what tiles cost.
namespace tessera::cuda {

constexpr int kGroupedMaxRows = 256;   ///< of a tile, the most columns that one product has
constexpr int kGroupedReduction = 64;  ///< values that one copy brings along the reduction
constexpr int kGroupedMaxExperts = 512;

/// How many tiles an expert's rows are cut into.
TESSERA_HOST_DEVICE constexpr int num_row_tiles(int num_rows, int max_rows = kGroupedMaxRows) {
  return (num_rows + max_rows - 1) / max_rows;
}

/// Up to which the products' numbers of columns are multiples of 32, above it of 8: with all rows
/// of a tile, and with one half of them.
constexpr int kCoarseColumns = 128;
constexpr int kCoarseHalfColumns = 96;

/// How many columns the products have that multiply a tile of rows.
TESSERA_HOST_DEVICE constexpr int product_columns(int num_rows) {
  const int step = num_rows <= kCoarseColumns ? 32 : 8;
  return (num_rows + step - 1) / step * step;
}

/// Of a tile whose rows are gathered, those of a cluster's first block; its second has the rest.
TESSERA_HOST_DEVICE constexpr int first_half_rows(int num_rows) {
  return (num_rows + 15) / 16 * 8;
}

/// product_columns of both blocks together where rows are gathered: the second's count as many.
TESSERA_HOST_DEVICE constexpr int gathered_columns(int num_rows) {
  const int rows = first_half_rows(num_rows);
  const int step = rows <= kCoarseHalfColumns ? 32 : 8;
  return 2 * ((rows + step - 1) / step * step);
}

/// The rows of each of an expert's tiles but the last, which may have fewer: nearly equal parts.
TESSERA_HOST_DEVICE constexpr int tile_rows(int num_rows, int num_tiles) {
  return product_columns((num_rows + num_tiles - 1) / num_tiles);
}

/// An expert's part of a product y = a · W_eᵀ or a · W_e as its tiles see it.
struct TiledExpert {
  int64_t rows = 0;       ///< of a
  int64_t features = 0;   ///< columns of y
  int64_t reduction = 0;  ///< columns of a
};

struct TilePrediction {
  int64_t num_tiles = 0;  ///< steps of clusters of two blocks, 256 features each
  int tallest = 0;        ///< rows of the largest tile, as many as are multiplied
  double cycles = 0;      ///< until the last cluster ends
  double padding = 0;     ///< share of what is multiplied that is nobody's row or feature
  double idle = 0;        ///< share of the clusters' time after their last tile
};

/// The GPU that the model was fitted on, one H200.
constexpr int kModelClusters = 66;  ///< of two SMs
constexpr double kModelClockHz = 1.755e9;
/// Heights of tiles to compare; the kernels take the first.
inline constexpr std::array kTileHeights = {kGroupedMaxRows, 224, 192, 160, 128, 96, 64};

/// The parts of at most `size` that a total is cut into.
constexpr int64_t num_parts_of(int64_t total, int64_t size) {
  return (total + size - 1) / size;
}

/// What a block takes for a stage of a cluster's tile of 256 by `columns` results: the longer of
/// its products and its loads, of one half of each operand.
double stage_cycles(int columns);

/// What tiles of at most max_rows rows would take on `num_clusters` clusters that take one tile
/// after the other. A stage of 64 values of the reduction takes the longer of its products and its
/// loads, a tile some more cycles to begin and to end. Of gathered rows it knows the columns, not
/// that they take 4 to 6 % longer to come.
TilePrediction predict_tiles(std::span<const TiledExpert> experts, int max_rows, int num_clusters,
                             bool gathered = false);

}  // namespace tessera::cuda
