// pre = a · W_eᵀ and act = silu(gate) · up · prob of each expert's tokens. The weight's tiles have
// 8 gate rows and the 8 up rows that belong to them in alternation, so that a thread's accumulators
// hold both factors of each feature.
#include "ops/cuda/activation_math.cuh"
#include "ops/cuda/ptx/pairs_box.cuh"
#include "ops/expert_activation/activated_product_kernels.h"
#include "ops/expert_activation/activated_store.cuh"
#include "ops/grouped_matmul/grouped_pipeline.cuh"
#include "ops/grouped_matmul/grouped_store.cuh"

namespace tessera::cuda {
namespace {

using namespace grouped;

constexpr int kOwnFeatures = kActivatedStoreColumns;  // of a warpgroup: as many gates, as many ups

struct WriteActivated {
  using Params = ActivatedRowsParams;
  // More leave too few registers for what is done with the results.
  static constexpr int kTileTokens = 240;
  static constexpr int kBoxTokens = kActivatedBoxTokens;
  using Kept = KeptTile<kTileTokens>;
  static constexpr bool kGathers = false;
  static constexpr SparsePart kSparse = SparsePart::kNone;
  static constexpr bool kLongSteps = true;
  using Operands = Bf16Operands;
  static constexpr TileMajor kWeightMajor = TileMajor::kReduction;
  static constexpr int kSteps = (kTileTokens + kStoreTokens - 1) / kStoreTokens;

  using Tiles = ActivatedTiles<kOwnFeatures>;
  struct Store {
    Tiles tiles[2][2];  // of each warpgroup that multiplies
  };
  static __device__ void init(Store& /*memory*/) {}

  /// Gates and ups.
  static __device__ int features(const Params& params, int expert) {
    return params.block_begin[expert + 1] - params.block_begin[expert];
  }
  static __device__ int reduction(const Params& params, int /*expert*/) { return params.wide; }

  static __device__ void load_weight(Value* tile, const Params& params, const Work& work, int k,
                                     Barrier* full) {
    load_pairs(tile, &params.weight,
               PairsBox{.column = k, .group = work.feature / 16, .expert = work.expert}, full);
  }

  static __device__ __forceinline__ Place place(Place tile, int group) {
    tile.feature = tile.feature / 2 + group * kOwnFeatures;
    tile.num_features /= 2;
    if (tile.feature >= tile.num_features) tile.num_rows = 0;
    return tile;
  }

  template <int kColumns>
  static __device__ __forceinline__ void keep(Kept& kept, const float (&d)[kColumns / 2],
                                              int /*half*/) {
    keep_tile<kColumns>(kept, d);
  }

  static __device__ __forceinline__ void begin_store(Store& /*memory*/, const Params& params,
                                                     Kept& kept, const Place& place, int group) {
    kept.prob = load_prob(params.probs, place, 0);
    if (is_leader()) wait_stores_read<0>();
    sync_threads(1 + group, kWarpgroup);
  }

  /// The first thread sees to it that TMA has read the other tiles before they are
  /// filled by the next step.
  static __device__ __forceinline__ void store_step(Store& memory, const Params& params, Kept& kept,
                                                    const Place& place, int step, int group) {
    const int first = step * kStoreTokens;
    if (first >= place.num_rows) return;
    Tiles& tiles = memory.tiles[group][step % 2];
    fill(tiles, kept);
    fence_shared_for_async();
    if (is_leader()) wait_stores_read<0>();
    sync_threads(1 + group, kWarpgroup);
    store(params, place, tiles, first);
    if (is_leader()) commit_stores();
    kept.prob = load_prob(params.probs, place, first + kStoreTokens);
    drop_stored<kStoreTokens>(kept);
  }

 private:
  /// From what this thread keeps of the next 32 tokens.
  static __device__ __forceinline__ void fill(Tiles& tiles, const Kept& kept) {
    const int lane = read_lane();
    const int warp = read_warp();
    uint32_t act[4];
#pragma unroll
    for (int eight = 0; eight < 4; ++eight) {
      const float2 gate = unpack(kept.packed[2 * eight]);
      const float2 up = unpack(kept.packed[2 * eight + 1]);
      const float2 prob = probs_of(kept.prob, lane, eight);
      act[eight] = pack(Silu::value(gate.x) * up.x * prob.x, Silu::value(gate.y) * up.y * prob.y);
    }
    const uint32_t* const p = kept.packed;
    const int at = lane * kOwnFeatures + swizzled_chunk<kOwnFeatures>(warp, lane) * 8;
    store_matrices(tiles.gate + at, p[0], p[2], p[4], p[6]);
    store_matrices(tiles.up + at, p[1], p[3], p[5], p[7]);
    store_matrices(tiles.act + at, act[0], act[1], act[2], act[3]);
  }

  static __device__ __forceinline__ void store(const Params& params, const Place& place,
                                               const Tiles& tiles, int first) {
    TilePlace to = {.row = place.row + first,
                    .num_rows = place.num_rows - first,
                    .column = place.feature,
                    .num_columns = place.num_features - place.feature};
    store_tile<kOwnFeatures>(&params.act_map, static_cast<Value*>(params.act), place.num_features,
                             tiles.act, to);
    Value* const pre = static_cast<Value*>(params.y);
    if (pre == nullptr) return;
    store_tile<kOwnFeatures>(&params.y_map, pre, params.y_columns, tiles.gate, to);
    to.column += place.num_features;
    store_tile<kOwnFeatures>(&params.y_map, pre, params.y_columns, tiles.up, to);
  }
};

}  // namespace

void launch_activated_rows(const ActivatedRowsParams& params, cudaStream_t stream) {
  launch<WriteActivated>(params, stream);
}

}  // namespace tessera::cuda
