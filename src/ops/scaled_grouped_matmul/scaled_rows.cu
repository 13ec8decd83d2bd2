// y = a · W_eᵀ of each expert's tokens, of E4M3 values whose rows have scales.
#include "ops/scaled_grouped_matmul/scaled_tiles.cuh"

namespace tessera::cuda {
namespace {

using namespace grouped;

/// The scales of a thread's results. A warp has those of all tokens of the tile, each once: lane l
/// those of columns 8 j + 2 (l % 4) + i for j = l / 4 + 8 m, as [m][i].
struct RowFactors {
  float tokens[kMaxTokens / 64][2];
  float features[2];
};

struct WriteScaledRows : WritesScaled<WriteScaledRows, kMaxTokens> {
  static __device__ __forceinline__ RowFactors load_factors(const Params& params,
                                                            const Place& place, int weight_row,
                                                            int group) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4;
    RowFactors factors;
#pragma unroll
    for (int m = 0; m < kMaxTokens / 64; ++m) {
      const int column = 8 * (lane / 4 + 8 * m) + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        factors.tokens[m][i] =
            column + i < place.num_rows ? params.a_scales[place.row + column + i] : 0.0F;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int feature = place.feature + group * 64 + 16 * warp + 8 * h + lane / 4;
      factors.features[h] =
          feature < place.num_features ? params.weight_scales[weight_row + feature] : 0.0F;
    }
    return factors;
  }

  template <int kColumns>
  static __device__ __forceinline__ void scale(float (&d)[kColumns / 2],
                                               const RowFactors& factors) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float token = __shfl_sync(~0U, factors.tokens[j / 8][i], j % 8 * 4 + lane % 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) d[4 * j + 2 * h + i] *= token * factors.features[h];
      }
    }
  }
};

}  // namespace

void launch_scaled_rows(const ScaledRowsParams& params, cudaStream_t stream) {
  launch<WriteScaledRows>(params, stream);
}

}  // namespace tessera::cuda
