// y = a · W_eᵀ and y = a · W_e of each expert's tokens.
#include "ops/grouped_matmul/grouped_pipeline.cuh"

namespace tessera::cuda {
namespace {

using namespace grouped;

constexpr int kStoreBuffer = 128;  // tokens whose results have room

using Params = GroupedRowsParams;

/// A tile's results as a thread keeps them: BF16, in the accumulators' order (WarpgroupProduct).
struct KeptRows {
  uint32_t packed[kMaxTokens / 4];
  int row;
  int num_rows;  // zero where there is nothing to store
  int feature;
  int num_features;
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

/// Stores up to 32 tokens of what is kept, from `first` on.
__device__ __forceinline__ void store_chunk(const Params& params, const KeptRows& kept,
                                            const Value* tile, int first) {
  const int num_rows = min(kStoreTokens, kept.num_rows - first);
  const int num_columns = min(64, kept.num_features - kept.feature);
  const bool leader = threadIdx.x % kWarpgroup == 0;
  if (num_rows == kStoreTokens && num_columns == 64) {
    if (leader) store_box(&params.y_map, tile, {kept.feature, kept.row + first});
  } else {
    Value* const y = static_cast<Value*>(params.y) +
                     static_cast<int64_t>(kept.row + first) * params.y_columns + kept.feature;
    store_part(tile, y, params.y_columns, num_rows, num_columns);
  }
}

template <bool kByOut, bool kFromTokens>
struct WriteRows {
  using Params = GroupedRowsParams;
  static constexpr bool kGathers = kFromTokens;
  static constexpr bool kDefers = !kFromTokens;  // those that gather lack the registers
  static constexpr TileMajor kWeightMajor = kByOut ? TileMajor::kReduction : TileMajor::kOther;

  struct Store {
    Value tiles[2][kStoreBuffer * 64];  // of each warpgroup that multiplies
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

  // Tokens that are stored at once: few where nothing else is done meanwhile.
  static constexpr int kPassTokens = kDefers ? kStoreBuffer : kStoreBuffer / 2;
  static constexpr int kPasses = kMaxTokens / kPassTokens;
  static constexpr int kBuffers = kStoreBuffer / kPassTokens;
  using Kept = KeptRows;

  template <int kColumns>
  static __device__ __forceinline__ void keep(Kept& kept, const Work& work,
                                              const float (&d)[kColumns / 2], int group) {
    kept.feature = work.feature + group * 64;
    kept.num_features = work.num_features;
    kept.row = work.row;
    kept.num_rows = kept.feature < work.num_features ? work.num_rows : 0;
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(d[2 * i], d[2 * i + 1]);
      kept.packed[i] = reinterpret_cast<const uint32_t&>(two);
    }
  }

  template <int kPass>
  static __device__ __forceinline__ void store(Store& memory, const Params& params, Kept& kept,
                                               int group) {
    constexpr int kFirst = kPass * kPassTokens;
    if (kFirst >= kept.num_rows) return;
    const bool leader = threadIdx.x % kWarpgroup == 0;
    Value* const tile = memory.tiles[group] + kPass % kBuffers * (kPassTokens * 64);
    // Its first buffer may be the one that the tile before stored last.
    if (leader) wait_stores_read<kPass == 0 ? 0 : kBuffers - 1>();
    sync_threads(1 + group, kWarpgroup);
    fill_store<kPassTokens>(tile, kept.packed + kFirst / 4);
    fence_shared_for_async();
    sync_threads(1 + group, kWarpgroup);
    for (int first = kFirst; first < min(kFirst + kPassTokens, kept.num_rows);
         first += kStoreTokens)
      store_chunk(params, kept, tile + (first - kFirst) * 64, first);
    if (leader) commit_stores();
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
