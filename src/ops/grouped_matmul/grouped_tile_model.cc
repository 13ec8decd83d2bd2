#include "ops/grouped_matmul/grouped_tile_model.h"

#include <algorithm>
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

}  // namespace tessera::cuda
