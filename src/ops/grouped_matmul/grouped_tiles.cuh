#pragma once

namespace tessera::cuda {

/// One step of a persistent cluster: a tile of one expert's part of a grouped product.
struct GroupedTile {
  int expert;
  int major;  ///< which tile along the ragged or first dim
  int minor;  ///< which pair of tiles along the other dim
};

/// Where each expert's tiles begin in the order in which clusters take them; in shared memory.
struct GroupedTiles {
  int* begin;  // [num_experts + 1]
  int num_experts;

  __device__ int num_tiles() const { return begin[num_experts]; }

  /// The expert that a tile belongs to: the last one that begins at or before it.
  __device__ int expert_of(int tile) const {
    int low = 0;
    int high = num_experts;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (begin[middle] <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  /// The tile's place in its expert: bands of kBand majors, inside a band the majors first, so that
  /// blocks that run at once share both operands in the L2 cache.
  __device__ GroupedTile locate(int tile, int num_majors_of_expert, int num_minors,
                                int expert) const {
    constexpr int kBand = 8;
    const int local = tile - begin[expert];
    const int band = local / (kBand * num_minors);
    const int in_band = local - band * kBand * num_minors;
    const int height = min(kBand, num_majors_of_expert - band * kBand);
    return {expert, band * kBand + in_band % height, in_band / height};
  }
};

/// Sums `counts` of the experts into `begin`; called by all threads of a warp. num_tiles(e) gives
/// an expert's number of tiles.
template <typename NumTiles>
__device__ void sum_tiles(const GroupedTiles& tiles, const NumTiles& num_tiles) {
  const int lane = threadIdx.x % 32;
  int total = 0;
  for (int first = 0; first < tiles.num_experts; first += 32) {
    const int expert = first + lane;
    const int own = expert < tiles.num_experts ? num_tiles(expert) : 0;
    int sum = own;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (expert < tiles.num_experts) tiles.begin[expert] = total + sum - own;
    total += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) tiles.begin[tiles.num_experts] = total;
  __syncwarp();
}

/// An expert and the first of the places of a tile in it; expert -1 for a block too many.
struct BlockTile {
  int expert;
  int64_t first;
};

/// This block's: blocks are dealt to experts in order, for every kTile of the places that
/// places_of(e) counts. By all threads, with num_experts + 1 integers of dynamic shared memory.
template <int kTile, typename PlacesOf>
__device__ BlockTile find_block_tile(int num_experts, const PlacesOf& places_of) {
  extern __shared__ int tile_begin[];
  const GroupedTiles tiles{tile_begin, num_experts};
  if (threadIdx.x < 32)
    sum_tiles(tiles, [&](int e) { return static_cast<int>((places_of(e) + kTile - 1) / kTile); });
  __syncthreads();
  const int tile = static_cast<int>(blockIdx.x);
  if (tile >= tiles.num_tiles()) return {-1, 0};
  const int expert = tiles.expert_of(tile);
  return {expert, int64_t{tile - tile_begin[expert]} * kTile};
}

}  // namespace tessera::cuda
