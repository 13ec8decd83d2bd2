// y = a · W_eᵀ of each expert's tokens, of E4M3 values whose rows have scales.
#include "ops/cuda/tile/product_factors.cuh"
#include "ops/scaled_grouped_matmul/scaled_tiles.cuh"

namespace tessera::cuda {
namespace {

using namespace grouped;

struct Factors {
  ColumnFactors<kMaxTokens> tokens;
  RowFactors features;
};

struct WriteScaledRows : WritesScaled<WriteScaledRows, kMaxTokens> {
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
};

}  // namespace

void launch_scaled_rows(const ScaledRowsParams& params, cudaStream_t stream) {
  launch<WriteScaledRows>(params, stream);
}

}  // namespace tessera::cuda
