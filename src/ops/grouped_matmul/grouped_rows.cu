// y = a · W_eᵀ and y = a · W_e of each expert's tokens.
#include "ops/grouped_matmul/grouped_rows.cuh"

namespace tessera::cuda {
namespace {

using namespace grouped;

template <bool kByOut, bool kFromTokens>
struct WriteRows : WritesRows<WriteRows<kByOut, kFromTokens>, GroupedRowsParams, kFromTokens> {
  using Params = GroupedRowsParams;
  static constexpr SparsePart kSparse = SparsePart::kNone;
  static constexpr TileMajor kWeightMajor = kByOut ? TileMajor::kReduction : TileMajor::kOther;

  static __device__ int features(const Params& params, int expert) {
    return kByOut ? WriteRows::size(params, expert) : params.wide;
  }
  static __device__ int reduction(const Params& params, int expert) {
    return kByOut ? params.wide : WriteRows::size(params, expert);
  }

  static __device__ void load_weight(Value* tile, const Params& params, const Work& work, int k,
                                     Barrier* full) {
    if constexpr (kByOut) {
      load_box(tile, &params.weight, {k, work.weight_row + work.feature}, full);
    } else {
      for (int half = 0; half < 2; ++half)
        load_box(tile + half * 64 * kReduction, &params.weight,
                 {work.feature + half * 64, work.weight_row + k}, full);
    }
  }

  /// What a block loads of the weight for both.
  static __device__ void load_shared_weight(Value* tile, const Params& params, const Work& work,
                                            int k, Barrier* full, uint32_t rank) {
    static_assert(kByOut);
    const int first = static_cast<int>(rank) * kFeatures;
    load_box_to_all(tile + first * kReduction, &params.weight,
                    {k, work.weight_row + work.feature + first}, full, 3);
  }

  static __device__ __forceinline__ void store_chunk(const Params& params, const Place& place,
                                                     const Value* tile, int first) {
    store_rows(params, place, tile, first);
  }
};

}  // namespace

void launch_grouped_rows(const GroupedRowsParams& params, bool by_out, cudaStream_t stream) {
  if (params.source != nullptr) {
    if (!by_out) check(cudaErrorInvalidValue);
    launch<WriteRows<true, true>>(params, stream);
  } else if (by_out) {
    launch<WriteRows<true, false>>(params, stream);
  } else {
    launch<WriteRows<false, false>>(params, stream);
  }
}

}  // namespace tessera::cuda
