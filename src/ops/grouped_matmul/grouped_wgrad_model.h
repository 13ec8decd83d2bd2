#pragma once

#include <cstdint>
#include <span>

/// What tiles of the experts' gradients (grouped_wgrad.cuh) would cost, by which they are chosen.
namespace tessera::cuda {

constexpr int kWgradRows = 256;  ///< of the gradient, of a cluster's tile

/// How a gradient is cut into tiles, and how the warpgroups that multiply share them: each takes
/// every second tile (ping-pong), or both work on each (cooperative).
struct WgradTiles {
  int columns = 0;  ///< of the gradient, of a cluster's tile
  bool ping_pong = false;

  bool operator==(const WgradTiles&) const = default;
};

/// Ping-pong tiles of at most these columns leave registers for what is added to.
constexpr int kWgradColumnsToAddHere = 128;
/// Where a tile has at least these stages, it is added to in the L2 cache instead.
constexpr int kWgradStagesToAddThere = 12;

struct WgradShape {
  int64_t num_experts = 0;
  int64_t tokens = 0;   ///< of an expert, on average of those that there is room for
  int64_t rows = 0;     ///< of an expert's gradient, on average
  int64_t columns = 0;  ///< likewise
  bool accumulate = false;
  bool gathered = false;
};

/// Those that there are kernels for.
std::span<const WgradTiles> wgrad_candidates(bool gathered, bool accumulate);

/// Cycles until the last of `num_clusters` clusters, which take one tile after the other, has
/// written its last tile. Every expert is taken to have the average number of tokens.
double predict_wgrad(const WgradShape& shape, const WgradTiles& tiles, int num_clusters);

/// The candidate that is predicted to take the least time. The results are the same bits with each.
WgradTiles choose_wgrad_tiles(const WgradShape& shape, int num_clusters);

}  // namespace tessera::cuda
