#include "ops/grouped_matmul/grouped_wgrad_model.h"

#include <algorithm>
#include <array>

#include "ops/grouped_matmul/grouped_tile_model.h"

namespace tessera::cuda {
namespace {

// Of one SM, fitted to where measured tiles of Qwen3's size are equally fast: the first two at some
// 3000 tokens of an expert (written) and 6000 (added to), the last two at 768. Alone, an SM wrote
// 28 bytes a cycle. What operands take is stage_cycles'.
constexpr double kBytesStoredPerCycle = 26;  // of results, and of what they are added to
constexpr double kBytesAddedPerCycle = 7.8;  // where the L2 cache adds

constexpr int64_t kBlockRows = kWgradRows / 2;
constexpr int64_t kProductColumns = 64;  // of which ping-pong's products have multiples

constexpr std::array kGathered = {WgradTiles{256, false}};
constexpr std::array kInOrder = {WgradTiles{256, false}, WgradTiles{192, true},
                                 WgradTiles{128, true}};

/// What a block's part of a tile takes to be written or added to, in registers or in the L2 cache.
double store_cycles(const WgradShape& shape, const WgradTiles& tiles, int64_t columns) {
  const auto bytes = static_cast<double>(kBlockRows * columns) * sizeof(float);
  if (!shape.accumulate) return bytes / kBytesStoredPerCycle;
  const bool adds_here = !tiles.ping_pong || tiles.columns <= kWgradColumnsToAddHere;
  return adds_here ? 2 * bytes / kBytesStoredPerCycle : bytes / kBytesAddedPerCycle;
}

/// Until a cluster has taken a tile and can begin the next. Ping-pong stores beside the next tile's
/// products.
double tile_cycles(const WgradShape& shape, const WgradTiles& tiles, int64_t columns) {
  const double products = static_cast<double>(num_parts_of(shape.tokens, kGroupedReduction)) *
                          stage_cycles(static_cast<int>(columns));
  const double store = store_cycles(shape, tiles, columns);
  return tiles.ping_pong ? std::max(products, store) : products + store;
}

/// The columns of the last of a row's tiles that are multiplied.
int64_t last_columns(const WgradShape& shape, const WgradTiles& tiles, int64_t num_tiles) {
  if (!tiles.ping_pong) return tiles.columns;
  const int64_t left = shape.columns - (num_tiles - 1) * tiles.columns;
  return num_parts_of(left, kProductColumns) * kProductColumns;
}

}  // namespace

std::span<const WgradTiles> wgrad_candidates(bool gathered, bool accumulate) {
  if (gathered) return kGathered;
  return std::span(kInOrder).first(accumulate ? 3 : 2);
}

double predict_wgrad(const WgradShape& shape, const WgradTiles& tiles, int num_clusters) {
  const int64_t per_row = num_parts_of(shape.columns, tiles.columns);
  const int64_t num_tiles = shape.num_experts * num_parts_of(shape.rows, kWgradRows) * per_row;
  if (num_tiles == 0) return 0;
  const double whole = tile_cycles(shape, tiles, tiles.columns);
  const double last = tile_cycles(shape, tiles, last_columns(shape, tiles, per_row));
  const auto all = static_cast<double>(per_row);
  const double mean = (whole * (all - 1) + last) / all;
  const auto waves = static_cast<double>(num_parts_of(num_tiles, num_clusters));
  const double end = tiles.ping_pong ? store_cycles(shape, tiles, tiles.columns) : 0;
  return waves * mean + end;
}

WgradTiles choose_wgrad_tiles(const WgradShape& shape, int num_clusters) {
  const auto candidates = wgrad_candidates(shape.gathered, shape.accumulate);
  return *std::ranges::min_element(candidates, {}, [&](const WgradTiles& tiles) {
    return predict_wgrad(shape, tiles, num_clusters);
  });
}

}  // namespace tessera::cuda
