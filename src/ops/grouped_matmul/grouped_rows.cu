// y = a · W_eᵀ and y = a · W_e of each expert's tokens.
#include "ops/grouped_matmul/grouped_pipeline.cuh"

namespace tessera::cuda {
namespace {

using namespace grouped;

constexpr int kPassTokens = 64;  // tokens that are stored at once
constexpr int kPassBuffers = 2;

using Params = GroupedRowsParams;

/// Writes this thread's part of accumulators d, which belong to tokens from kFirst on, to a BF16
/// tile of up to 32 tokens by 64 features that the warpgroup is about to store.
template <int kFirst, int kColumns>
__device__ __forceinline__ void fill_store(Value* tile, const float (&d)[kColumns / 2]) {
  constexpr int kEights = (kColumns - kFirst < kStoreTokens ? kColumns - kFirst : kStoreTokens) / 8;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  uint32_t packed[2 * kEights];
#pragma unroll
  for (int i = 0; i < 2 * kEights; ++i) {
    const __nv_bfloat162 two =
        __floats2bfloat162_rn(d[kFirst / 2 + 2 * i], d[kFirst / 2 + 2 * i + 1]);
    packed[i] = reinterpret_cast<const uint32_t&>(two);
  }
#pragma unroll
  for (int eight = 0; eight < kEights; eight += 2) {
    const int token = (eight + (eight + 1 < kEights ? lane / 16 : 0)) * 8 + lane % 8;
    const int chunk = (warp * 2 + lane / 8 % 2) ^ (token % 8);
    const uint32_t to = shared_address(tile + token * 64 + chunk * 8);
    const uint32_t* const p = packed + 2 * eight;
    if (eight + 1 < kEights) {
      asm volatile(
          "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
          "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3])
          : "memory");
    } else {
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to),
                   "r"(p[0]), "r"(p[1])
                   : "memory");
    }
  }
}

/// Stores the rows and columns that the copy engine would not stop at.
__device__ __forceinline__ void store_part(const Value* tile, Value* y, int64_t stride,
                                           int num_rows, int num_columns) {
  const int lane = threadIdx.x % kWarpgroup;
  const int column = lane % 8 * 8;
  for (int row = lane / 8; row < num_rows; row += kWarpgroup / 8) {
    const Value* from = tile + row * 64 + ((lane % 8) ^ (row % 8)) * 8;
    if (column + 8 <= num_columns) {
      *reinterpret_cast<uint4*>(y + row * stride + column) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int i = 0; column + i < num_columns; ++i) y[row * stride + column + i] = from[i];
    }
  }
}

__device__ __forceinline__ void store_chunk(const Params& params, const Work& work,
                                            const Value* tile, int feature, int first) {
  const int num_rows = min(kStoreTokens, work.num_rows - first);
  const int num_columns = min(64, work.num_features - feature);
  const bool leader = threadIdx.x % kWarpgroup == 0;
  if (num_rows == kStoreTokens && num_columns == 64) {
    if (leader) store_box(&params.y_map, tile, {feature, work.row + first});
  } else {
    Value* const y = static_cast<Value*>(params.y) +
                     static_cast<int64_t>(work.row + first) * params.y_columns + feature;
    store_part(tile, y, params.y_columns, num_rows, num_columns);
  }
}

template <bool kByOut, bool kFromTokens>
struct WriteRows {
  using Params = GroupedRowsParams;
  static constexpr bool kGathers = kFromTokens;
  static constexpr TileMajor kWeightMajor = kByOut ? TileMajor::kReduction : TileMajor::kOther;

  struct Store {
    Value tiles[2][kPassBuffers][kPassTokens * 64];  // of each warpgroup that multiplies
  };

  static __device__ int size(const Params& params, int expert) {
    return params.block_begin[expert + 1] - params.block_begin[expert];
  }
  static __device__ int features(const Params& params, int expert) {
    return kByOut ? size(params, expert) : params.wide;
  }
  static __device__ int reduction(const Params& params, int expert) {
    return kByOut ? params.wide : size(params, expert);
  }

  static __device__ void load_weight(Stage& stage, const Params& params, const Work& work, int k,
                                     Barrier* full) {
    if constexpr (kByOut) {
      load_box(stage.weight, &params.weight, {k, work.weight_row + work.feature}, full);
    } else {
      for (int half = 0; half < 2; ++half)
        load_box(stage.weight + half * 64 * kReduction, &params.weight,
                 {work.feature + half * 64, work.weight_row + k}, full);
    }
  }

  static __device__ void begin(Store&, const Params&, const Work&, int) {}

  template <int kColumns>
  static __device__ __forceinline__ void store(Store& memory, const Params& params,
                                               const Work& work, const float (&d)[kColumns / 2],
                                               int group) {
    const int feature = work.feature + group * 64;
    if (feature >= work.num_features) return;
    const bool leader = threadIdx.x % kWarpgroup == 0;
    for_each_step<kColumns, kPassTokens>([&]<int kFirst>() __attribute__((always_inline)) {
      constexpr int kEnd = kFirst + kPassTokens < kColumns ? kFirst + kPassTokens : kColumns;
      Value* const tile = memory.tiles[group][kFirst / kPassTokens % kPassBuffers];
      // The first buffer may be the one that the tile before stored last.
      if (leader) wait_stores_read<kFirst == 0 ? 0 : kPassBuffers - 1>();
      sync_threads(1 + group, kWarpgroup);
      for_each_step<kEnd - kFirst, kStoreTokens>([&]<int kChunk>() __attribute__((always_inline)) {
        fill_store<kFirst + kChunk, kColumns>(tile + kChunk * 64, d);
      });
      fence_shared_for_async();
      sync_threads(1 + group, kWarpgroup);
      for (int first = kFirst; first < min(kEnd, work.num_rows); first += kStoreTokens)
        store_chunk(params, work, tile + (first - kFirst) * 64, feature, first);
      if (leader) commit_stores();
    });
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
