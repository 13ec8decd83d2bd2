#pragma once

// What the tensor-core kernels of attention share: thread blocks of one warpgroup that issues TMA's
// copies and two that multiply by wgmma, 64 rows each. An operand of R rows by C values lies in
// shared memory as C / 64 tiles of R rows by 64 values, swizzled over 128 bytes.
#include <cuda_bf16.h>

#include "ops/attention/attention_cuda_kernels.h"
#include "ops/cuda/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/pipeline/ring_cursor.cuh"
#include "ops/cuda/pipeline/warp_roles.cuh"
#include "ops/cuda/ptx/bulk_copy.cuh"
#include "ops/cuda/ptx/fast_exp.cuh"
#include "ops/cuda/ptx/head_box.cuh"
#include "ops/cuda/ptx/register_product.cuh"

namespace tessera::cuda::attention {

using Value = __nv_bfloat16;

constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kTensorThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kConsumerThreads = kConsumers * kWarpgroup;
constexpr int kConsumerWarps = kConsumerThreads / 32;
constexpr int kClearBarrier = 1;

template <int kRows, int kColumns>
struct Operand {
  static constexpr int kTileBytes = kRows * 64 * sizeof(Value);
  static constexpr int kBytes = kColumns / 64 * kTileBytes;
  Value tiles[kColumns / 64][kRows * 64];

  __device__ void load(const CUtensorMap* map, int head, int row, Barrier* full) {
#pragma unroll
    for (int tile = 0; tile < kColumns / 64; ++tile) {
#pragma unroll
      for (int part = 0; part < kRows; part += kTensorBox)
        load_head_box(&tiles[tile][part * 64], map, {tile * 64, head, row + part}, full);
    }
  }
  /// Makes the rows from `begin` on zero, by all threads that multiply, so that factors of zero
  /// give zero whatever lay there.
  __device__ void clear_from(int begin) {
    constexpr int kChunks = 64 * sizeof(Value) / sizeof(uint4);
    const int per_tile = (kRows - begin) * kChunks;
    for (int i = threadIdx.x - kWarpgroup; i < per_tile * (kColumns / 64); i += kConsumerThreads) {
      auto* const tile = reinterpret_cast<uint4*>(tiles[i / per_tile]);
      tile[begin * kChunks + i % per_tile] = uint4{};
    }
  }
};

/// Makes what threads that multiply have written to shared memory visible to the tensor cores.
__device__ __forceinline__ void publish_cleared() {
  fence_shared_for_async();
  sync_threads(kClearBarrier, kConsumerThreads);
}

/// One arrival of each warp that multiplies.
__device__ __forceinline__ void release(Barrier& empty) {
  if (threadIdx.x % 32 == 0)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&empty))
                 : "memory");
}

/// d [64, kRowsB] = a b^T: the 64 rows of `a` from first_row on, all rows of `b`. Asynchronous.
template <int kRowsA, int kRowsB, int kDepth>
__device__ __forceinline__ void start_row_products(float (&d)[kRowsB / 2],
                                                   const Operand<kRowsA, kDepth>& a, int first_row,
                                                   const Operand<kRowsB, kDepth>& b) {
  constexpr TileMajor kMajor = TileMajor::kReduction;
#pragma unroll
  for (int tile = 0; tile < kDepth / 64; ++tile) {
    uint64_t a_part = describe_tile<kMajor>(&a.tiles[tile][first_row * 64], 0);
    uint64_t b_part = describe_tile<kMajor>(b.tiles[tile], 0);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (tile + k == 0) {
        FirstProduct<kRowsB>::run(d, a_part, b_part);
      } else {
        WarpgroupProduct<kRowsB, kMajor, kMajor>::run(d, a_part, b_part, true);
      }
      a_part += kNextReduction<kMajor>;
      b_part += kNextReduction<kMajor>;
    }
  }
}

/// d [64, kColumns] += a b, with a [64, kRows] as BF16 in registers. Asynchronous.
template <int kRows, int kColumns>
__device__ __forceinline__ void start_column_products(float (&d)[kColumns / 2],
                                                      const uint32_t (&a)[kRows / 16][4],
                                                      const Operand<kRows, kColumns>& b) {
  constexpr TileMajor kMajor = TileMajor::kOther;
  uint64_t b_part = describe_tile<kMajor>(b.tiles[0], Operand<kRows, kColumns>::kTileBytes);
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) {
    RegisterProduct<kColumns, kMajor>::run(d, a[k], b_part, true);
    b_part += kNextReduction<kMajor>;
  }
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

/// Accumulators as the left operand of the next product.
template <int kColumns>
__device__ __forceinline__ void pack_values(const float (&d)[kColumns / 2],
                                            uint32_t (&a)[kColumns / 16][4]) {
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[k][i] = pack(d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
  }
}

template <int kCount>
__device__ __forceinline__ void clear_values(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) d[i] = 0;
}

/// This thread's rows of its warpgroup's 64 are first and first + 8.
__device__ __forceinline__ int own_row() {
  return static_cast<int>(threadIdx.x) / 32 % 4 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
}
/// Its columns are first, first + 1, first + 8, first + 9, and so on.
__device__ __forceinline__ int own_column() {
  return static_cast<int>(threadIdx.x) % 4 * 2;
}
__device__ __forceinline__ int own_group() {
  return static_cast<int>(threadIdx.x) / kWarpgroup - 1;
}

/// Writes accumulators times `factor` of this row's half; `size` is a multiple of 8.
template <int kColumns>
__device__ __forceinline__ void store_row(Value* to, const float (&d)[kColumns / 2], int half,
                                          float factor, int size) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    if (j * 8 < size)
      *reinterpret_cast<uint32_t*>(to + j * 8 + own_column()) =
          pack(d[4 * j + 2 * half] * factor, d[4 * j + 2 * half + 1] * factor);
  }
}

template <int kColumns>
__device__ __forceinline__ void store_row(float* to, const float (&d)[kColumns / 2], int half,
                                          float factor, int size) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    if (j * 8 < size)
      *reinterpret_cast<float2*>(to + j * 8 + own_column()) =
          make_float2(d[4 * j + 2 * half] * factor, d[4 * j + 2 * half + 1] * factor);
  }
}

/// Writes the left operand of 64 rows by 64 columns that the warpgroup's registers hold to a tile
/// of 64 rows, swizzled as TMA does.
__device__ __forceinline__ void store_fragments(Value* tile, const uint32_t (&a)[4][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 8 % 2 * 8 + lane % 8;
  const uint32_t base = shared_address(tile) + row * 128;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t at = base + (((2 * k + lane / 16) ^ (row % 8)) << 4);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(a[k][0]), "r"(a[k][1]), "r"(a[k][2]), "r"(a[k][3])
                 : "memory");
  }
}

/// The kept pairs of a sequence's head.
struct PairTiles {
  Value* first;
  int64_t query_tiles;  ///< of 64

  __device__ __forceinline__ PairTiles(const KeptPairs& pairs, const Item& item, int head)
      : first(static_cast<Value*>(pairs.tiles) +
              ((head - pairs.first_head) * pairs.capacity + item.first_pairs) *
                  (kPairTileBytes / sizeof(Value))),
        query_tiles((item.length + 63) / 64) {}
  /// The 64 keys of half `half` of block `block` by the 64 queries of tile `query_tile`. A block
  /// has tiles from its own first query's on.
  __device__ __forceinline__ Value* at(int64_t block, int half, int query_tile) const {
    const int64_t tile = 2 * (block * (query_tiles - block - 1) + query_tile) + half;
    return first + tile * (kPairTileBytes / sizeof(Value));
  }
};

/// Calls run<kDepth, kDepthV>() with the least sizes of kernels that these fit in.
template <typename Run>
void with_head_sizes(int size, int size_v, const Run& run) {
  if (size <= 64 && size_v <= 64) return run.template operator()<64, 64>();
  if (size <= 128 && size_v <= 128) return run.template operator()<128, 128>();
  if (size <= 192 && size_v <= 128) return run.template operator()<192, 128>();
  run.template operator()<256, 256>();
}

/// An item and a head of it.
struct Task {
  Item item;
  int head;  ///< -1: there is no more, where a producer hands tasks on
};

/// As many query heads that share their keys and values let thread blocks that run at a time find
/// these in the L2 cache, whatever the order.
constexpr int kSharing = 4;

/// How many heads thread blocks take at a time, so that several read the same keys and values: as
/// few as fill whole turns of `blocks` tasks, but for a sixteenth.
__device__ __forceinline__ int heads_at_once(int num_items, int num_heads, int group, int blocks) {
  if (group >= kSharing) return num_heads;
  for (int heads = group; heads < num_heads; heads += group) {
    const int tasks = num_items * heads;
    const int idle = (blocks - tasks % blocks) % blocks;
    if (idle * 16 <= tasks) return heads;
  }
  return num_heads;
}

/// The tasks of this thread block. The list
/// has the longest first, so that turns that go back and forth give all blocks as much to do.
struct TaskLoop {
  const TensorParams& params;
  int num_heads;
  int first_block = 0;  ///< those before it have other work
  const int* num_items = params.num_items;
  const Item* items = params.items;
  int turn = 0;
  int count = 0;       ///< *num_items, when at_once is known
  int at_once = 0;     ///< heads; unknown before the first task
  int first_head = 0;  ///< of those
  int begin = 0;       ///< the turn's first task among those heads'

  /// False after the last.
  __device__ bool next(Task& task) {
    const int blocks = static_cast<int>(gridDim.x) - first_block;
    const int block = static_cast<int>(blockIdx.x) - first_block;
    if (at_once == 0) {
      count = *num_items;
      at_once = heads_at_once(count, num_heads, params.heads.num_heads / params.heads.num_kv_heads,
                              blocks);
    }
    while (first_head < num_heads) {
      const int heads = min(at_once, num_heads - first_head);
      const int at = begin + (turn % 2 == 0 ? block : blocks - 1 - block);
      const int item = at / heads;
      const int head = first_head + at % heads;
      ++turn;
      begin += blocks;
      if (begin >= count * heads) {
        first_head += heads;
        begin = 0;
      }
      if (item < count) {
        task = {items[item], head};
        return true;
      }
    }
    return false;
  }
};

/// launch_tensor_key_grads of heads that need kernels for 256 elements.
void launch_wide_key_grads(const TensorParams& params, cudaStream_t stream);

template <typename Shared, typename Kernel>
void launch_tensor(Kernel kernel, const TensorParams& params, int num_blocks, cudaStream_t stream) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  launch_early(kernel, {static_cast<unsigned>(num_blocks), kTensorThreads, sizeof(Shared)}, stream,
               params);
}

}  // namespace tessera::cuda::attention
