// The gradient of the experts' matrices of E4M3 values along tokens, of which an expert's share a
// scale: the tensor cores' sums are scaled before they are stored.
#include "ops/scaled_grouped_wgrad/scaled_wgrad_tiles.cuh"

namespace tessera::cuda {
namespace {

using namespace wgrad;

template <int kTileColumns, bool kPingPong, bool kAdds>
struct ExpertScales : ScaledSchedule<kTileColumns, kPingPong, kAdds> {
  using Base = ScaledSchedule<kTileColumns, kPingPong, kAdds>;

  struct Factors {
    ColumnFactors<Base::kColumns> columns;
    RowFactors rows[Base::kHalves];
  };

  /// Zeros where there are no tokens, whose sums are zeros.
  static __device__ __forceinline__ Factors load_factors(const ScaledWgradParams& params,
                                                         const DenseWork& work, int first_half) {
    const bool has_tokens = work.num_tokens > 0;
    Factors factors;
    factors.columns.load(
        params.wide_scales + int64_t{work.expert} * params.num_columns + work.column,
        has_tokens ? params.num_columns - work.column : 0);
    const float* const rows = params.narrow_scales + int64_t{work.expert} * params.narrow_columns;
#pragma unroll
    for (int half = 0; half < Base::kHalves; ++half) {
      const int row = work.row + (first_half + half) * 64;
      factors.rows[half].load(rows + row, has_tokens ? work.num_rows - row : 0);
    }
    return factors;
  }
};

template <int kTileColumns, bool kPingPong>
void launch(const ScaledWgradParams& params, cudaStream_t stream) {
  params.accumulate ? wgrad::launch<ExpertScales<kTileColumns, kPingPong, true>>(params, stream)
                    : wgrad::launch<ExpertScales<kTileColumns, kPingPong, false>>(params, stream);
}

/// The tiles of a BF16 gradient with as many stages.
WgradTiles choose_tiles(const ScaledWgradParams& params) {
  constexpr int kTimes = TokenOperands::kTokens / RowOperands::kTokens;
  return choose_wgrad_tiles({.num_experts = params.num_experts,
                             .tokens = params.num_rows / params.num_experts / kTimes,
                             .rows = params.weight_rows / params.num_experts,
                             .columns = params.num_columns,
                             .accumulate = params.accumulate},
                            num_clusters());
}

}  // namespace

void launch_scaled_wgrad_rows(const ScaledWgradParams& params, cudaStream_t stream) {
  switch (choose_tiles(params).columns) {
    case 256:
      return launch<256, false>(params, stream);
    case 192:
      return launch<192, true>(params, stream);
    default:
      return wgrad::launch<ExpertScales<128, true, true>>(params, stream);
  }
}

}  // namespace tessera::cuda
