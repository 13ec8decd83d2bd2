#pragma once

#include "ops/grouped_matmul/grouped_pipeline.cuh"
#include "ops/grouped_matmul/grouped_store.cuh"

/// What epilogues of grouped_pipeline.cuh share that round a tile's results to BF16 and store them.
namespace tessera::cuda {
namespace grouped {

/// The results of a tile as a thread keeps them: BF16, in the accumulators' order
/// (WarpgroupProduct).
struct KeptRows {
  uint32_t packed[kMaxTokens / 4];
};

/// Writes what this thread keeps of kTokens tokens to a tile of them by 64 features.
template <int kTokens>
__device__ __forceinline__ void fill_store(Value* tile, const uint32_t* packed) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int eight = 0; eight < kTokens / 8; eight += 2) {
    const int token = (eight + lane / 16) * 8 + lane % 8;
    const int chunk = (warp * 2 + lane / 8 % 2) ^ (token % 8);
    const uint32_t to = shared_address(tile + token * 64 + chunk * 8);
    const uint32_t* const p = packed + 2 * eight;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3])
                 : "memory");
  }
}

/// Stores up to 32 tokens of what is kept, from `first` on, to rows of a matrix.
__device__ __forceinline__ void store_rows(const GroupedRowsParams& params, const Place& place,
                                           const Value* tile, int first) {
  store_tile<64>(&params.y_map, static_cast<Value*>(params.y), params.y_columns, tile,
                 {.row = place.row + first,
                  .num_rows = place.num_rows - first,
                  .column = place.feature,
                  .num_columns = place.num_features - place.feature});
}

/// The part of an epilogue that does so, by store_chunk(params, place, tile, first) of `Own`, which
/// derives from this.
template <typename Own, typename OwnParams, bool kFromTokens>
struct WritesRows {
  using Params = OwnParams;
  using Operands = Bf16Operands;
  static constexpr int kTileTokens = kMaxTokens;
  static constexpr int kStoreBuffer = kTileTokens / 2;  // tokens whose results have room
  static constexpr int kBoxTokens = kGroupedBoxRows;
  static constexpr bool kGathers = kFromTokens;
  static constexpr bool kLongSteps = false;

  struct Store {
    Value tiles[2][kStoreBuffer * 64];  // of each warpgroup that multiplies
  };
  static __device__ void init(Store& /*memory*/) {}

  static __device__ int size(const Params& params, int expert) {
    return params.block_begin[expert + 1] - params.block_begin[expert];
  }

  static constexpr int kSteps = 2;
  using Kept = KeptRows;

  static __device__ __forceinline__ Place place(Place tile, int group) {
    tile.feature += group * Cut<Own>::kHalves * 64;
    if (tile.feature >= tile.num_features) tile.num_rows = 0;
    return tile;
  }

  template <int kColumns>
  static __device__ __forceinline__ void keep(Kept& kept, const float (&d)[kColumns / 2],
                                              int half) {
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(d[2 * i], d[2 * i + 1]);
      kept.packed[half * kStoreBuffer / 4 + i] = reinterpret_cast<const uint32_t&>(two);
    }
  }

  static __device__ __forceinline__ void begin_store(Store& /*memory*/, const Params& /*params*/,
                                                     Kept& /*kept*/, const Place& /*place*/,
                                                     int /*group*/) {}

  template <int kStep = 0>
  static __device__ __forceinline__ void store_step(Store& memory, const Params& params, Kept& kept,
                                                    const Place& place, int step, int group) {
    if constexpr (kStep < kSteps) {
      if (step == kStep) return store<kStep>(memory, params, kept, place, group);
      store_step<kStep + 1>(memory, params, kept, place, step, group);
    }
  }

 private:
  /// Half of the tokens, or all of one half of the features.
  template <int kPass>
  static __device__ __forceinline__ void store(Store& memory, const Params& params, Kept& kept,
                                               Place place, int group) {
    constexpr int kFirst = kGathers ? 0 : kPass * kStoreBuffer;
    if constexpr (kGathers) {
      place.feature += kPass * 64;
      if (place.feature >= place.num_features) return;
    }
    if (kFirst >= place.num_rows) return;
    const bool leader = threadIdx.x % kWarpgroup == 0;
    Value* const tile = memory.tiles[group];
    if (leader) wait_stores_read<0>();
    sync_threads(1 + group, kWarpgroup);
    fill_store<kStoreBuffer>(tile, kept.packed + kPass * kStoreBuffer / 4);
    fence_shared_for_async();
    sync_threads(1 + group, kWarpgroup);
    for (int first = kFirst; first < min(kFirst + kStoreBuffer, place.num_rows);
         first += kStoreTokens)
      Own::store_chunk(params, place, tile + (first - kFirst) * 64, first);
    if (leader) commit_stores();
  }
};

}  // namespace grouped
}  // namespace tessera::cuda
