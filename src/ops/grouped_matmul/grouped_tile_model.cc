#include "ops/grouped_matmul/grouped_tile_model.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <vector>

namespace tessera::cuda {
namespace {

constexpr int64_t kFeatures = 256;  // of a cluster
constexpr int64_t kReduction = 64;  // of a stage

// Of one SM, fitted to measured products (docs/log.md).
constexpr double kCyclesPerColumn = 4;  // 128 features by 64 values: 2048 products a cycle
constexpr double kBytesPerCycle = 34;   // from the L2 cache
constexpr double kTileCycles = 6000;    // until the first stage is there, and to write the results

// The rows of a balanced router's experts, of their average.
constexpr std::array kSpread = {0.8, 1.0, 1.25};
// Of the largest tiles, from which on no other height gains.
constexpr double kManyTiles = 3;  // a cluster
// Of smaller tiles over larger ones, whose weights are loaded and whose code is fetched less often.
constexpr double kLeastGain = 0.03;


/// When clusters that take one tile after the other are ready for the next.
class Clusters {
 public:
  explicit Clusters(int count) : count_(count) {
    for (int i = 0; i < count; ++i) ready_.push(0);
  }
  void take(double cycles) {
    const double end = ready_.top() + cycles;
    ready_.pop();
    ready_.push(end);
    last_ = std::max(last_, end);
    busy_ += cycles;
  }
  double last() const { return last_; }
  double idle() const { return last_ > 0 ? 1 - busy_ / (last_ * count_) : 0; }

 private:
  int count_;
  std::priority_queue<double, std::vector<double>, std::greater<>> ready_;
  double last_ = 0;
  double busy_ = 0;
};

}  // namespace

double stage_cycles(int columns) {
  constexpr double kValueBytes = 2;
  constexpr double kWeightBytes = kValueBytes * kFeatures * kReduction / 2;
  const double token_bytes = kValueBytes * columns * kReduction / 2;
  return std::max(kCyclesPerColumn * columns, (kWeightBytes + token_bytes) / kBytesPerCycle);
}

TilePrediction predict_tiles(std::span<const TiledExpert> experts, int max_rows, int num_clusters,
                             bool gathered) {
  Clusters clusters(num_clusters);
  TilePrediction result;
  double used = 0;
  double multiplied = 0;
  for (const TiledExpert& expert : experts) {
    const int64_t pairs = num_parts_of(expert.features, kFeatures);
    const int64_t stages = num_parts_of(expert.reduction, kReduction);
    const int num_rows = static_cast<int>(expert.rows);
    const int num_tiles = num_row_tiles(num_rows, max_rows);
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int height = tile_rows(num_rows, num_tiles);
      const int rows = std::min(height, num_rows - tile * height);
      const int columns = gathered ? gathered_columns(rows) : product_columns(rows);
      for (int64_t pair = 0; pair < pairs; ++pair)
        clusters.take(static_cast<double>(stages) * stage_cycles(columns) + kTileCycles);
      result.tallest = std::max(result.tallest, columns);
      multiplied += static_cast<double>(columns * pairs * kFeatures * expert.reduction);
    }
    result.num_tiles += num_tiles * pairs;
    used += static_cast<double>(expert.rows * expert.features * expert.reduction);
  }
  result.cycles = clusters.last();
  result.idle = clusters.idle();
  if (multiplied > 0) result.padding = 1 - used / multiplied;
  return result;
}

namespace {

struct FewTiles {
  double per_cluster = 0;
  double cycles = 0;  // until the last cluster ends
};

/// Of experts whose rows are spread by kSpread, a third of them each. Clusters end their last tiles
/// at about one time, but for the longest.
FewTiles predict_spread(const GroupedRowsShape& shape, int max_rows, int num_clusters) {
  const double stages = static_cast<double>(num_parts_of(shape.reduction, kReduction));
  const auto experts = static_cast<double>(shape.num_experts) / kSpread.size();
  const auto pairs = static_cast<double>(num_parts_of(shape.features, kFeatures));
  double num_tiles = 0;
  double total = 0;
  double longest = 0;
  for (const double part : kSpread) {
    const int rows = static_cast<int>(std::ceil(part * static_cast<double>(shape.rows)));
    const int tiles = num_row_tiles(rows, max_rows);
    if (tiles == 0) continue;
    const int height = tile_rows(rows, tiles);
    const int columns = shape.gathered ? gathered_columns(height) : product_columns(height);
    const double cycles = stages * stage_cycles(columns) + kTileCycles;
    num_tiles += experts * pairs * tiles;
    total += experts * pairs * tiles * cycles;
    longest = std::max(longest, cycles);
  }
  if (num_tiles == 0) return {};
  const double waves = std::ceil(num_tiles / num_clusters);
  return {.per_cluster = num_tiles / num_clusters,
          .cycles = (waves - 1) * total / num_tiles + longest};
}

}  // namespace

int choose_tile_rows(const GroupedRowsShape& shape, int num_clusters) {
  if (predict_spread(shape, kGroupedMaxRows, num_clusters).per_cluster > kManyTiles)
    return kGroupedMaxRows;
  int best = kGroupedMaxRows;
  double least = predict_spread(shape, best, num_clusters).cycles;
  for (const int max_rows : kTileHeights) {
    const double cycles = predict_spread(shape, max_rows, num_clusters).cycles;
    if (cycles >= (1 - kLeastGain) * least) continue;
    best = max_rows;
    least = cycles;
  }
  return best;
}

}  // namespace tessera::cuda
