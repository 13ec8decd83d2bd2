// values = a · W_eᵀ (SDD) and y = values · W_e (DSD) of each expert's rows, the weight stored by
// its rows or by its columns.
#include "ops/block_sparse/expert_kernels.h"
#include "ops/grouped_matmul/grouped_rows.cuh"

namespace tessera::cuda {
namespace {

using namespace grouped;

template <bool kGivesValues, bool kWeightByRows>
struct WriteExpertRows
    : WritesRows<WriteExpertRows<kGivesValues, kWeightByRows>, ExpertRowsParams, false> {
  using Params = ExpertRowsParams;
  static constexpr SparsePart kSparse = kGivesValues ? SparsePart::kResult : SparsePart::kTokens;
  /// Whether a tile's features are rows of the stored weight, whose columns then are summed over.
  static constexpr bool kFeaturesAreRows = kGivesValues == kWeightByRows;
  static constexpr TileMajor kWeightMajor =
      kFeaturesAreRows ? TileMajor::kReduction : TileMajor::kOther;

  static __device__ int features(const Params& params, int expert) {
    return kGivesValues ? WriteExpertRows::size(params, expert) : params.wide;
  }
  static __device__ int reduction(const Params& params, int expert) {
    return kGivesValues ? params.wide : WriteExpertRows::size(params, expert);
  }

  static __device__ void load_weight(Value* tile, const Params& params, const Work& work, int k,
                                     Barrier* full) {
    const int feature = work.feature + (kGivesValues ? work.weight_row : 0);
    const int along = k + (kGivesValues ? 0 : work.weight_row);
    if constexpr (kFeaturesAreRows) {
      load_box(tile, &params.weight, {along, feature}, full);
    } else {
      for (int half = 0; half < 2; ++half)
        load_box(tile + half * 64 * kReduction, &params.weight, {feature + half * 64, along}, full);
    }
  }

  static __device__ __forceinline__ void store_chunk(const Params& params, const Place& place,
                                                     const Value* tile, int first) {
    if constexpr (kGivesValues) {
      if (threadIdx.x % kWarpgroup == 0)
        store_block_box(params.values.map_of(place.num_features), tile,
                        block_box(place.row + place.feature / 64, place.num_rows, first));
    } else {
      store_rows(params, place, tile, first);
    }
  }
};

}  // namespace

void launch_expert_rows(const ExpertRowsParams& params, bool gives_values, bool weight_by_rows,
                        cudaStream_t stream) {
  if (gives_values) {
    weight_by_rows ? launch<WriteExpertRows<true, true>>(params, stream)
                   : launch<WriteExpertRows<true, false>>(params, stream);
  } else {
    weight_by_rows ? launch<WriteExpertRows<false, true>>(params, stream)
                   : launch<WriteExpertRows<false, false>>(params, stream);
  }
}

}  // namespace tessera::cuda
