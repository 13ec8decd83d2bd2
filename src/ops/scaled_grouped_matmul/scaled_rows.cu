// y = a · W_eᵀ of each expert's tokens, of E4M3 values whose rows have scales.
#include "ops/cuda/tile/product_factors.cuh"
#include "ops/grouped_matmul/grouped_rows.cuh"
#include "ops/scaled_grouped_matmul/scaled_kernels.h"

namespace tessera::cuda {
namespace {

using namespace grouped;

struct E4m3Operands {
  using Value = uint8_t;
  static constexpr int kReduction = 128;
  static constexpr int kProductReduction = 32;
  template <int kColumns, TileMajor kWeight>
  using Product = WarpgroupProductE4m3<kColumns>;
};

struct Factors {
  ColumnFactors<kMaxTokens> tokens;
  RowFactors features;
};

struct WriteScaledRows : WritesRows<WriteScaledRows, ScaledRowsParams, false> {
  using Params = ScaledRowsParams;
  using Operands = E4m3Operands;
  static constexpr SparsePart kSparse = SparsePart::kNone;
  static constexpr TileMajor kWeightMajor = TileMajor::kReduction;

  static __device__ int features(const Params& params, int expert) { return size(params, expert); }
  static __device__ int reduction(const Params& params, int /*expert*/) { return params.wide; }

  static __device__ void load_weight(uint8_t* tile, const Params& params, const Work& work, int k,
                                     Barrier* full) {
    load_box(tile, &params.weight, {k, work.weight_row + work.feature}, full);
  }

  static __device__ __forceinline__ Factors load_factors(const Params& params, const Place& place,
                                                         int weight_row, int group) {
    const int feature = place.feature + group * 64;
    Factors factors;
    factors.tokens.load(params.a_scales + place.row, place.num_rows);
    factors.features.load(params.weight_scales + weight_row + feature,
                          place.num_features - feature);
    return factors;
  }

  template <int kColumns>
  static __device__ __forceinline__ void scale(float (&d)[kColumns / 2], const Factors& factors) {
    scale_products<kColumns>(d, factors.tokens, factors.features);
  }

  static __device__ __forceinline__ void store_chunk(const Params& params, const Place& place,
                                                     const Value* tile, int first) {
    store_rows(params, place, tile, first);
  }
};

}  // namespace

void launch_scaled_rows(const ScaledRowsParams& params, cudaStream_t stream) {
  launch<WriteScaledRows>(params, stream);
}

}  // namespace tessera::cuda
