#pragma once

#include <cuda_bf16.h>

#include "ops/cuda/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/ptx/block_box.cuh"
#include "ops/cuda/ptx/bulk_copy.cuh"
#include "ops/cuda/ptx/warpgroup_product.cuh"
#include "ops/cuda/tile/product_factors.cuh"
#include "ops/grouped_matmul/grouped_gather.cuh"
#include "ops/grouped_matmul/grouped_kernels.h"
#include "ops/grouped_matmul/grouped_wgrad_lines.cuh"
#include "ops/grouped_matmul/grouped_wgrad_plan.cuh"

/// The gradient of the experts' matrices on Hopper's tensor cores: the sum over an expert's tokens
/// of the products of a narrow and a wide row. Both operands are read as they lie, tokens along the
/// reduction. Persistent clusters of two blocks that take neighbouring rows of the gradient and
/// share the wide operand, or, where its rows are gathered, neighbouring columns and share the
/// narrow one; one warpgroup issues TMA's copies and two multiply by wgmma.
///
/// Where experts have few tokens, the F32 values take as long to write as to compute: the two
/// warpgroups take every second tile each, *ping-pong*: one multiplies while the other stores.
/// Their tiles are as large as the registers allow, since the operands' way from the L2 cache is
/// the next bound. Where experts have many tokens, the two share a larger tile, *cooperative*:
/// fewer bytes for each product, and thus less power, which bounds the GPU's clock. Gathered rows
/// are taken cooperatively. grouped_wgrad_model.h chooses; the bits are the same.
namespace tessera::cuda {
namespace wgrad {

/// Whether results have factors of their own: load_factors(params, work, first_half) gives those of
/// columns and of the rows of each half.
template <typename W>
constexpr bool kHasFactors = requires(const typename W::Params& params,
                                      const typename W::Work& work) {
  W::load_factors(params, work, 0);
};

/// Whether stages have scales, and warpgroups multiply in turns, of a cooperative Schedule:
///   scale_bytes(params, work), load_scales(scales, params, work, token, full)    of a block's part
///   begin(group), multiply(shared, params, work, group, cursor)    in place of the pipeline's
template <typename W>
constexpr bool kTurns = requires {
  W::kTakesTurns;
};

/// What the block of this rank does of the cluster's work.
template <typename W>
__device__ __forceinline__ typename W::Work own_part(typename W::Work work, uint32_t rank) {
  if constexpr (W::kGathers) {
    work.column += static_cast<int>(rank) * W::kColumns;
  } else {
    work.row += static_cast<int>(rank) * W::kBlockRows;
  }
  return work;
}

/// 64 columns of a stage of the sparse operand; beyond the expert's last column any of its own,
/// whose results nobody takes.
__device__ __forceinline__ BlockBox sparse_box(const SparseWork& work, int stage, int column) {
  const int end = work.values + (stage + 1) * work.size;
  return block_box(end + min(column, work.size - 64) / 64, kTokens, 0);
}

/// Each block loads its own part of one operand, and one half of what both need of the other. What
/// is gathered is the own part.
template <typename W>
__device__ void produce(typename W::Shared& shared, const typename W::Params& params,
                        uint32_t rank) {
  using Stage = typename W::Stage;
  using Operands = typename W::Operands;
  constexpr uint32_t kBytes = W::kGathers ? sizeof(Stage::narrow) : sizeof(Stage);
  typename W::Cursor cursor;
  uint32_t turn = 0;
  for (;;) {
    const typename W::Work work = own_part<W>(shared.queue.take(turn), rank);
    if (work.expert < 0) return let_next_begin();
    for (int s = 0; s < work.num_stages; ++s) {
      Stage& stage = shared.stages[cursor.stage];
      Barrier* const full = &shared.full[cursor.stage];
      const int token = work.first_token + s * Operands::kTokens;
      shared.empty[cursor.stage].wait(cursor.parity ^ 1);
      if constexpr (kTurns<W>) {
        full->arrive_and_expect(kBytes + W::scale_bytes(params, work));
        W::load_scales(shared.scales[cursor.stage], params, work, token, full);
      } else {
        full->arrive_and_expect(kBytes);
      }
      if constexpr (W::kGathers) {
        for (int i = rank; i < W::kBlockRows / 64; i += 2)
          load_box_to_all(stage.narrow[i], &params.narrow, {work.row + i * 64, token}, full, 3);
      } else {
        for (int i = 0; i < W::kBlockRows / 64; ++i) {
          if constexpr (W::kSparse == SparseOperand::kRows) {
            load_block_box(stage.narrow[i], params.values.map_of(work.size),
                           sparse_box(work, s, work.row + i * 64), full);
          } else {
            load_box(stage.narrow[i], &params.narrow, Operands::box(work.row + i * 64, token),
                     full);
          }
        }
        for (int i = rank; i < W::kColumns / 64; i += 2) {
          if constexpr (W::kSparse == SparseOperand::kColumns) {
            load_block_box_to_all(stage.wide[i], params.values.map_of(work.size),
                                  sparse_box(work, s, work.column + i * 64), full, 3);
          } else {
            load_box_to_all(stage.wide[i], &params.wide, Operands::box(work.column + i * 64, token),
                            full, 3);
          }
        }
      }
      cursor.advance();
    }
  }
}

/// By one of the warps that gather: copies its part of this block's tiles of the wide operand of
/// all stages. Where the next stage's tokens are is read before this one's are copied, and waited
/// for after.
template <typename W>
__device__ void gather(typename W::Shared& shared, const typename W::Params& params, uint32_t rank,
                       int warp) {
  constexpr int kOwn = kTokens / kGatherWarps;
  typename W::Cursor cursor;
  uint32_t turn = 0;
  for (;;) {
    const typename W::Work work = own_part<W>(shared.queue.take_in_warp(turn), rank);
    if (work.expert < 0) return;
    const Value* const from = static_cast<const Value*>(params.tokens) + work.column;
    const auto sources_of = [&](int s) {
      return load_sources<kOwn>(params, work.first_token + s * kTokens,
                                work.num_tokens - s * kTokens, warp);
    };
    auto sources = sources_of(0);
    for (int s = 0; s < work.num_stages; ++s) {
      const auto places = places_of(sources, params.top_k, params.num_columns);
      sources = sources_of(s + 1);
      shared.empty[cursor.stage].wait(cursor.parity ^ 1);
      copy_rows<W::kColumns / 64, kTokens>(shared.stages[cursor.stage].wide[0], from,
                                           params.num_columns - work.column, places, kTokens, warp);
      arrive_when_copied(&shared.full[cursor.stage]);
      cursor.advance();
    }
  }
}

template <typename W>
constexpr int kMostSteps = W::Operands::kTokens / W::Operands::kStep;

/// The products' steps that a stage's tokens need.
template <typename W>
__device__ __forceinline__ int num_steps(int num_tokens) {
  constexpr int kStep = W::Operands::kStep;
  return min((num_tokens + kStep - 1) / kStep, kMostSteps<W>);
}

/// Makes the rows of the last step's tokens from num_tokens on zero in `num_tiles` tiles, by one
/// warpgroup.
template <typename W>
__device__ void clear_rows(Value* first_tile, int num_tiles, int num_tokens) {
  constexpr int kChunks = sizeof(Value) * 64 / sizeof(uint4);
  auto* const tiles = reinterpret_cast<uint4*>(first_tile);
  const int per_tile = (num_steps<W>(num_tokens) * W::Operands::kStep - num_tokens) * kChunks;
  for (int i = threadIdx.x % kWarpgroup; i < per_tile * num_tiles; i += kWarpgroup)
    tiles[i / per_tile * (kTokens * kChunks) + num_tokens * kChunks + i % per_tile] = uint4{};
}

/// Clears the rows of tokens that are not the expert's but are multiplied, in both operands: a
/// value times zero is not zero if it is not finite. What is gathered is zero there. Of a tile that
/// they share, each warpgroup clears its own half of the narrow operand, and the first one the wide
/// operand.
template <typename W>
__device__ __forceinline__ void clear_tail(typename W::Stage& stage, int num_tokens, int group) {
  const int first_half = W::kPingPong ? 0 : group * W::kHalves;
  clear_rows<W>(stage.narrow[first_half], W::kHalves, num_tokens);
  if (!W::kGathers && first_half == 0) clear_rows<W>(stage.wide[0], W::kColumns / 64, num_tokens);
  fence_shared_for_async();
  if constexpr (W::kPingPong) {
    sync_threads(1 + group, kWarpgroup);
  } else {
    sync_threads(1, 2 * kWarpgroup);
  }
}

__device__ __forceinline__ int num_rows_of(const DenseWork& work) {
  return work.num_rows;
}
__device__ __forceinline__ int num_rows_of(const SparseWork& work) {
  return work.size;
}

/// Where this thread's values of one half of the rows go. Each is written, or added to, once in
/// the grid, so that sums do not depend on an order.
template <typename W>
__device__ __forceinline__ lines::Place place_of(const typename W::Params& params,
                                                 const typename W::Work& work, int half) {
  const int row = work.row + half * 64;
  if constexpr (W::kSparse == SparseOperand::kColumns) {
    float* const first =
        params.grad + int64_t{row} * params.num_columns + work.block_begin + work.column;
    return lines::find_place(first, params.num_columns, params.dense_columns - row,
                             work.size - work.column);
  } else {
    float* const first =
        params.grad + int64_t{work.block_begin + row} * params.num_columns + work.column;
    return lines::find_place(first, params.num_columns, num_rows_of(work) - row,
                             params.num_columns - work.column);
  }
}

/// Adds to the gradient or writes it, from registers.
template <typename W, int kColumns>
__device__ __forceinline__ void store(const typename W::Params& params,
                                      const typename W::Work& work, int first_half,
                                      const float (&d)[W::kHalves][kColumns / 2],
                                      lines::Before<W::kGroupsAhead>& before, bool adds_here) {
#pragma unroll
  for (int half = 0; half < W::kHalves; ++half) {
    const lines::Place place = place_of<W>(params, work, first_half + half);
    if (adds_here) {
      if (half > 0) lines::load_first(place, before);
      lines::add_and_store<kColumns>(place, d[half], before);
    } else {
      lines::store_there<kColumns, W::kAccumulate>(place, d[half]);
    }
  }
}

/// Begins the products of a stage's first `steps` steps. Each number of steps has instructions of
/// its own: in a loop the compiler lets them wait for each other (its warning C7520).
template <typename W, int kColumns, int kSteps = kMostSteps<W>>
__device__ __forceinline__ void multiply_stage(const typename W::Stage& stage, int first_half,
                                               int steps, float (&d)[W::kHalves][kColumns / 2]) {
  using Product = typename W::Operands::template Product<kColumns>;
  constexpr TileMajor kMajor = W::Operands::kMajor;
  if constexpr (kSteps > 1) {
    if (steps < kSteps) return multiply_stage<W, kColumns, kSteps - 1>(stage, first_half, steps, d);
  }
  uint64_t narrow[W::kHalves];
#pragma unroll
  for (int half = 0; half < W::kHalves; ++half)
    narrow[half] = describe_tile<kMajor>(stage.narrow[first_half + half], 0);
  uint64_t wide = describe_tile<kMajor>(stage.wide[0], sizeof(stage.wide[0]));
  begin_products();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int half = 0; half < W::kHalves; ++half) {
      Product::run(d[half], narrow[half], wide, true);
      narrow[half] += kNextReduction<kMajor>;
    }
    wide += kNextReduction<kMajor>;
  }
  commit_products();
}

template <typename W, int kColumns>
__device__ __forceinline__ void multiply(typename W::Shared& shared,
                                         const typename W::Params& params,
                                         const typename W::Work& work, int group,
                                         typename W::Cursor& cursor) {
  using Operands = typename W::Operands;
  const int first_half = W::kPingPong ? 0 : group * W::kHalves;
  float d[W::kHalves][kColumns / 2];
#pragma unroll
  for (int half = 0; half < W::kHalves; ++half) {
#pragma unroll
    for (float& value : d[half]) value = 0;
  }
  const int lane = threadIdx.x % kWarpgroup;
  int last = 0;
  for (int s = 0; s < work.num_stages; ++s) {
    typename W::Stage& stage = shared.stages[cursor.stage];
    shared.full[cursor.stage].wait(cursor.parity);
    if constexpr (W::kIsSparse) {
      multiply_stage<W, kColumns>(stage, first_half, kMostSteps<W>, d);
    } else {
      const int left = work.num_tokens - s * Operands::kTokens;
      if (!Operands::kFilledUp && left < Operands::kTokens) {
        clear_tail<W>(stage, left, group);
      } else if constexpr (W::kGathers) {
        fence_shared_for_async();
      }
      multiply_stage<W, kColumns>(stage, first_half, num_steps<W>(left), d);
    }
    wait_products<1>();
    if (s > 0 && lane < 2) shared.empty[last].arrive_at(lane);
    last = cursor.stage;
    cursor.advance();
  }
  if (W::kPingPong && lane % 32 == 0) shared.begins[1 - group].arrive();
  const bool adds_here = W::adds_here(work.num_stages);
  lines::Before<W::kGroupsAhead> before = {};
  if (adds_here) lines::load_first(place_of<W>(params, work, first_half), before);
  if constexpr (kHasFactors<W>) {
    const auto factors = W::load_factors(params, work, first_half);
    wait_products<0>();
#pragma unroll
    for (int half = 0; half < W::kHalves; ++half) {
      fence_values(d[half]);
      scale_products<kColumns>(d[half], factors.columns, factors.rows[half]);
    }
  } else {
    wait_products<0>();
#pragma unroll
    for (int half = 0; half < W::kHalves; ++half) fence_values(d[half]);
  }
  if (work.num_stages > 0 && lane < 2) shared.empty[last].arrive_at(lane);
  store<W, kColumns>(params, work, first_half, d, before, adds_here);
}

template <typename W>
__device__ __forceinline__ int columns_left(const typename W::Params& params,
                                            const typename W::Work& work) {
  if constexpr (W::kSparse == SparseOperand::kColumns) return work.size - work.column;
  return params.num_columns - work.column;
}

/// multiply() with as many columns as the tile has, in steps of 64: accumulators need a size known
/// when compiled.
template <typename W, int kColumns = W::kColumns>
__device__ __forceinline__ void multiply_columns(typename W::Shared& shared,
                                                 const typename W::Params& params,
                                                 const typename W::Work& work, int group,
                                                 typename W::Cursor& cursor) {
  if constexpr (W::kPingPong && kColumns > 64) {
    if (columns_left<W>(params, work) <= kColumns - 64)
      return multiply_columns<W, kColumns - 64>(shared, params, work, group, cursor);
  }
  if constexpr (kTurns<W>) {
    W::multiply(shared, params, work, group, cursor);
  } else {
    multiply<W, kColumns>(shared, params, work, group, cursor);
  }
}

/// Waits for the products of the cluster's tile `turn`, of which each warpgroup takes every
/// second: until all stages before it have come, or a stage's barrier could be taken for its next
/// turn's.
template <typename Shared>
__device__ __forceinline__ void wait_begin(Shared& shared, uint32_t turn) {
  const uint32_t group = turn % 2;
  shared.begins[group].wait((turn / 2 + 1 - group) % 2);
}

template <typename W>
__device__ __forceinline__ void consume(typename W::Shared& shared,
                                        const typename W::Params& params, uint32_t rank) {
  typename W::Cursor cursor;
  uint32_t turn = 0;
  const int group = threadIdx.x / kWarpgroup - 1;
  if constexpr (kTurns<W>) W::begin(group);
  for (;;) {
    const uint32_t now = turn;
    const typename W::Work work = own_part<W>(shared.queue.take_in_warp(turn), rank);
    if (work.expert < 0) break;
    if (W::kPingPong && now % 2 != static_cast<uint32_t>(group)) {
      cursor.advance(work.num_stages);
      continue;
    }
    if constexpr (W::kPingPong) wait_begin(shared, now);
    multiply_columns<W>(shared, params, work, group, cursor);
  }
}

/// By a warp of the cluster's first block.
template <typename W>
__device__ void plan_work(typename W::Shared& shared, const typename W::Params& params) {
  const Plan<W> plan{params, {shared.tile_begin, params.num_experts}};
  sum_tiles(plan.tiles, [&](int expert) {
    // An expert without tokens adds nothing, but its gradient must be written where it is not
    // added to.
    return plan.has_tokens(expert) || !params.accumulate
               ? plan.pairs(expert) * plan.column_tiles(expert)
               : 0;
  });
  const auto wait = [&](const typename W::Work& work, uint32_t turn) {
    if constexpr (!W::kPingPong) {
      shared.queue.wait_taken(turn);
    } else if (work.num_stages > kShortStages) {
      wait_begin(shared, turn - 1);
    }
  };
  if (threadIdx.x % 32 == 0)
    hand_out_all(
        shared.queue, plan.tiles.num_tiles(), params.counter,
        [&](int tile) { return plan.work(tile); }, wait);
}

template <typename W>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_wgrad_kernel(const __grid_constant__ typename W::Params params) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename W::Shared*>(memory);
  constexpr bool kGathers = W::kGathers;
  if (threadIdx.x == 0) {
    if constexpr (W::kSparse != SparseOperand::kRows) prefetch(&params.narrow);
    if constexpr (!kGathers && W::kSparse != SparseOperand::kColumns) prefetch(&params.wide);
    for (int s = 0; s < W::kStages; ++s) {
      shared.full[s].init(kGathers ? 1 + kGatherArrivals : 1);
      shared.empty[s].init(W::kReleases);
    }
    for (Barrier& begins : shared.begins) begins.init(kWarpgroup / 32);
    shared.queue.init(kGathers ? 3 : 1);
    fence_barrier_init();
  }
  __syncthreads();
  sync_cluster();
  wait_for_earlier();
  const uint32_t rank = cluster_rank();
  if (threadIdx.x < kWarpgroup) {
    Roles::begin_feeding();
    if (threadIdx.x == 0) {
      produce<W>(shared, params, rank);
    } else if (threadIdx.x / 32 == 1 && rank == 0) {
      plan_work<W>(shared, params);
    } else if constexpr (kGathers) {
      const int warp = threadIdx.x / 32 - kFirstGatherWarp;
      if (warp >= 0) gather<W>(shared, params, rank, warp);
    }
  } else {
    Roles::begin_multiplying();
    consume<W>(shared, params, rank);
  }
  __syncwarp();  // of single threads' warps
  sync_cluster();
}

template <typename W>
void launch(const typename W::Params& params, cudaStream_t stream) {
  const auto kernel = grouped_wgrad_kernel<W>;
  constexpr size_t kBytes = sizeof(typename W::Shared);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  launch_early(kernel, {static_cast<unsigned>(2 * num_clusters()), kThreads, kBytes}, stream,
               params);
}

}  // namespace wgrad
}  // namespace tessera::cuda
