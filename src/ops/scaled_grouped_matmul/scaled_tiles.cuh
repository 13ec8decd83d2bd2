#pragma once

#include "ops/grouped_matmul/grouped_rows.cuh"
#include "ops/scaled_grouped_matmul/scaled_kernels.h"

/// What the products of scaled FP8 values share, whatever their scales are of.
namespace tessera::cuda {
namespace grouped {

struct E4m3Operands {
  using Value = uint8_t;
  static constexpr int kReduction = 128;
  static constexpr int kProductReduction = 32;
  template <int kColumns, TileMajor kWeight>
  using Product = WarpgroupProductE4m3<kColumns>;
};

template <typename Own, int kTokens>
struct WritesScaled : WritesRows<Own, ScaledRowsParams, false, kTokens> {
  using Params = ScaledRowsParams;
  using Operands = E4m3Operands;
  static constexpr SparsePart kSparse = SparsePart::kNone;
  static constexpr TileMajor kWeightMajor = TileMajor::kReduction;

  static __device__ int features(const Params& params, int expert) {
    return WritesScaled::size(params, expert);
  }
  static __device__ int reduction(const Params& params, int /*expert*/) { return params.wide; }

  static __device__ void load_weight(uint8_t* tile, const Params& params, const Work& work, int k,
                                     Barrier* full) {
    load_box(tile, &params.weight, {k, work.weight_row + work.feature}, full);
  }

  static __device__ __forceinline__ void store_chunk(const Params& params, const Place& place,
                                                     const Value* tile, int first) {
    store_rows(params, place, tile, first);
  }
};

}  // namespace grouped
}  // namespace tessera::cuda
