// Small products of the same rows, or of one sum, on Hopper's tensor cores by one launch: a block
// makes a tile of 128 rows by 64 features, two blocks share an SM. One warp issues TMA's copies,
// two warpgroups multiply 64 rows each.
#include <cuda_bf16.h>

#include "ops/cuda/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/parts.cuh"
#include "ops/cuda/pipeline/ring_cursor.cuh"
#include "ops/cuda/pipeline/warp_roles.cuh"
#include "ops/cuda/ptx/bulk_copy.cuh"
#include "ops/cuda/ptx/warpgroup_product.cuh"
#include "ops/cuda/short_kernel.cuh"
#include "ops/linear/joined_linear_kernels.h"

namespace tessera::cuda {
namespace {

using Value = __nv_bfloat16;

constexpr int kGroups = kJoinedRows / 64;  // warpgroups that multiply
constexpr int kThreads = kGroups * kWarpgroup + 32;
constexpr int kStages = 4;
constexpr int kBlocks = 2;                  // of an SM
constexpr int kSums = kJoinedFeatures / 2;  // of a thread

struct Stage {
  Value rows[kJoinedRows * kJoinedReduction];
  Value weight[kJoinedFeatures * kJoinedReduction];
};

struct Shared {
  Stage stages[kStages];
  Barrier full[kStages];
  Barrier empty[kStages];
};
static_assert(kBlocks * (sizeof(Shared) + 1024) <= kMaxShared);

using Cursor = RingCursor<kStages>;

__device__ __forceinline__ int num_stages(const JoinedProduct& product) {
  return (product.reduction + kJoinedReduction - 1) / kJoinedReduction;
}

/// The products that this block works on, and the features of its tile.
struct Tile {
  int begin;
  int end;
  int feature;
  int64_t row;

  template <bool kSummed>
  static __device__ __forceinline__ Tile own(const JoinedProducts& p) {
    const int at = static_cast<int>(blockIdx.x);
    const int64_t row = static_cast<int64_t>(blockIdx.y) * kJoinedRows;
    if constexpr (kSummed) return {0, p.count, at * kJoinedFeatures, row};
    const int i = find_part(p.first_tile, p.count, at);
    return {i, i + 1, (at - p.first_tile[i]) * kJoinedFeatures, row};
  }
};

/// By one thread.
template <bool kSummed>
__device__ __forceinline__ void produce(Shared& shared, const JoinedProducts& p, const Tile& tile) {
  Cursor cursor;
  for (int i = tile.begin; i < tile.end; ++i) {
    const JoinedProduct& product = p.products[i];
    for (int s = 0; s < num_stages(product); ++s) {
      Stage& stage = shared.stages[cursor.stage];
      Barrier* const full = &shared.full[cursor.stage];
      const int k = s * kJoinedReduction;
      shared.empty[cursor.stage].wait(cursor.parity ^ 1);
      full->arrive_and_expect(sizeof(Stage));
      load_box(stage.rows, &product.rows, {k, static_cast<int>(tile.row)}, full);
      load_box(stage.weight, &product.weight, kSummed ? Box{tile.feature, k} : Box{k, tile.feature},
               full);
      cursor.advance();
    }
  }
}

/// The warpgroup's part of one product of the tile.
template <bool kSummed>
__device__ __forceinline__ void multiply(Shared& shared, int stages, int group, Cursor& cursor,
                                         float (&sums)[kSums]) {
  constexpr TileMajor kRowsMajor = TileMajor::kReduction;
  constexpr TileMajor kWeightMajor = kSummed ? TileMajor::kOther : TileMajor::kReduction;
#pragma unroll
  for (float& sum : sums) sum = 0;
  fence_values(sums);
  int last = 0;
  for (int s = 0; s < stages; ++s) {
    const Stage& stage = shared.stages[cursor.stage];
    uint64_t rows = describe_tile<kRowsMajor>(stage.rows + group * 64 * kJoinedReduction, 0);
    uint64_t weight = describe_tile<kWeightMajor>(stage.weight, sizeof(stage.weight));
    shared.full[cursor.stage].wait(cursor.parity);
    begin_products();
#pragma unroll
    for (int k = 0; k < kJoinedReduction / 16; ++k) {
      WarpgroupProduct<kJoinedFeatures, kRowsMajor, kWeightMajor>::run(sums, rows, weight, true);
      rows += kNextReduction<kRowsMajor>;
      weight += kNextReduction<kWeightMajor>;
    }
    commit_products();
    wait_products<1>();
    if (s > 0 && threadIdx.x % kWarpgroup == 0) shared.empty[last].arrive();
    last = cursor.stage;
    cursor.advance();
  }
  wait_products<0>();
  fence_values(sums);
  if (stages > 0 && threadIdx.x % kWarpgroup == 0) shared.empty[last].arrive();
}

/// Calls visit(i, offset) for the first of each two neighbouring sums of this thread that lie in
/// the result [num_rows, features].
template <typename Visit>
__device__ __forceinline__ void for_each_pair(const Tile& tile, int64_t num_rows, int features,
                                              int group, Visit visit) {
  const int thread = threadIdx.x % kWarpgroup;
  const int64_t row = tile.row + group * 64 + thread / 32 * 16 + thread % 32 / 4;
  const int column = tile.feature + 2 * (thread % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= num_rows) continue;
    const int64_t offset = (row + 8 * half) * features + column;
#pragma unroll
    for (int j = 0; j < kJoinedFeatures / 8; ++j)
      if (column + 8 * j < features) visit(4 * j + 2 * half, offset + 8 * j);
  }
}

__device__ __forceinline__ void store(Value* to, const Tile& tile, int64_t num_rows, int features,
                                      int group, const float (&sums)[kSums]) {
  for_each_pair(tile, num_rows, features, group, [&](int i, int64_t offset) {
    *reinterpret_cast<__nv_bfloat162*>(to + offset) = __floats2bfloat162_rn(sums[i], sums[i + 1]);
  });
}

__device__ __forceinline__ void write_product(Shared& shared, const JoinedProducts& p,
                                              const Tile& tile, int group) {
  const JoinedProduct& product = p.products[tile.begin];
  float sums[kSums];
  Cursor cursor;
  multiply<false>(shared, num_stages(product), group, cursor, sums);
  store(static_cast<Value*>(product.y), tile, p.num_rows, product.features, group, sums);
}

__device__ __forceinline__ void write_sum(Shared& shared, const JoinedProducts& p, const Tile& tile,
                                          int group) {
  const int features = p.products[0].features;
  float total[kSums] = {};
  if (p.addend != nullptr) {
    for_each_pair(tile, p.num_rows, features, group, [&](int i, int64_t offset) {
      const auto pair =
          *reinterpret_cast<const __nv_bfloat162*>(static_cast<const Value*>(p.addend) + offset);
      total[i] = __low2float(pair);
      total[i + 1] = __high2float(pair);
    });
  }
  Cursor cursor;
  for (int i = tile.begin; i < tile.end; ++i) {
    float sums[kSums];
    multiply<true>(shared, num_stages(p.products[i]), group, cursor, sums);
#pragma unroll
    for (int j = 0; j < kSums; ++j)
      total[j] = __bfloat162float(__float2bfloat16_rn(sums[j] + total[j]));
  }
  store(static_cast<Value*>(p.sum), tile, p.num_rows, features, group, total);
}

template <bool kSummed>
__global__ void __launch_bounds__(kThreads, kBlocks)
    joined_products(const __grid_constant__ JoinedProducts p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  const Tile tile = Tile::own<kSummed>(p);
  if (threadIdx.x == 0) {
    for (int i = tile.begin; i < tile.end; ++i) {
      prefetch(&p.products[i].rows);
      prefetch(&p.products[i].weight);
    }
    for (int s = 0; s < kStages; ++s) {
      shared.full[s].init(1);
      shared.empty[s].init(kGroups);
    }
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_earlier();
  let_next_begin();  // all blocks run at once
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (group == kGroups) {
    if (threadIdx.x % 32 == 0) produce<kSummed>(shared, p, tile);
  } else if constexpr (kSummed) {
    write_sum(shared, p, tile, group);
  } else {
    write_product(shared, p, tile, group);
  }
}

/// A tile of 64 features by 64 columns of one gradient; the two operands of a stage lie along the
/// rows that are summed over.
struct GradientStage {
  Value grad[kJoinedFeatures * kJoinedReduction];
  Value x[kJoinedFeatures * kJoinedReduction];
};
constexpr int kGradientStages = 6;
constexpr int kGradientThreads = kWarpgroup + 32;

struct GradientShared {
  GradientStage stages[kGradientStages];
  Barrier full[kGradientStages];
  Barrier empty[kGradientStages];
};
static_assert(kBlocks * (sizeof(GradientShared) + 1024) <= kMaxShared);

using GradientCursor = RingCursor<kGradientStages>;

__device__ __forceinline__ void bring_rows(GradientShared& shared, const JoinedGradients& p,
                                           const JoinedGradient& own, int feature, int column) {
  GradientCursor cursor;
  for (int row = 0; row < p.num_rows; row += kJoinedReduction) {
    GradientStage& stage = shared.stages[cursor.stage];
    Barrier* const full = &shared.full[cursor.stage];
    shared.empty[cursor.stage].wait(cursor.parity ^ 1);
    full->arrive_and_expect(sizeof(GradientStage));
    load_box(stage.grad, &own.grad, {feature, row}, full);
    load_box(stage.x, &p.x, {column, row}, full);
    cursor.advance();
  }
}

__device__ __forceinline__ void sum_rows(GradientShared& shared, int num_rows,
                                         float (&sums)[kSums]) {
  constexpr TileMajor kMajor = TileMajor::kOther;
#pragma unroll
  for (float& sum : sums) sum = 0;
  fence_values(sums);
  GradientCursor cursor;
  int last = 0;
  for (int row = 0; row < num_rows; row += kJoinedReduction) {
    const GradientStage& stage = shared.stages[cursor.stage];
    uint64_t grad = describe_tile<kMajor>(stage.grad, sizeof(stage.grad));
    uint64_t x = describe_tile<kMajor>(stage.x, sizeof(stage.x));
    shared.full[cursor.stage].wait(cursor.parity);
    begin_products();
#pragma unroll
    for (int k = 0; k < kJoinedReduction / 16; ++k) {
      WarpgroupProduct<kJoinedFeatures, kMajor, kMajor>::run(sums, grad, x, true);
      grad += kNextReduction<kMajor>;
      x += kNextReduction<kMajor>;
    }
    commit_products();
    wait_products<1>();
    if (row > 0 && threadIdx.x == 0) shared.empty[last].arrive();
    last = cursor.stage;
    cursor.advance();
  }
  wait_products<0>();
  fence_values(sums);
}

__device__ __forceinline__ void write_gradient(const JoinedGradients& p, const JoinedGradient& own,
                                               int feature, int column,
                                               const float (&sums)[kSums]) {
  const Tile tile{0, 1, column, feature};
  for_each_pair(tile, own.features, p.width, 0, [&](int i, int64_t offset) {
    auto* const to = reinterpret_cast<float2*>(own.sums + offset);
    float2 pair{sums[i], sums[i + 1]};
    if (p.accumulate) {
      const float2 before = *to;
      pair = {before.x + pair.x, before.y + pair.y};
    }
    *to = pair;
  });
}

__global__ void __launch_bounds__(kGradientThreads, kBlocks)
    joined_gradients(const __grid_constant__ JoinedGradients p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<GradientShared*>(memory);
  const int at = static_cast<int>(blockIdx.y);
  const int i = find_part(p.first_tile, p.count, at);
  const JoinedGradient& own = p.gradients[i];
  const int feature = (at - p.first_tile[i]) * kJoinedFeatures;
  const int column = static_cast<int>(blockIdx.x) * kJoinedFeatures;
  if (threadIdx.x == 0) {
    prefetch(&own.grad);
    prefetch(&p.x);
    for (int s = 0; s < kGradientStages; ++s) {
      shared.full[s].init(1);
      shared.empty[s].init(1);
    }
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_earlier();
  let_next_begin_if_short();
  if (threadIdx.x >= kWarpgroup) {
    if (threadIdx.x % 32 == 0) bring_rows(shared, p, own, feature, column);
    return;
  }
  float sums[kSums];
  sum_rows(shared, p.num_rows, sums);
  write_gradient(p, own, feature, column, sums);
}

template <bool kSummed>
void launch(const JoinedProducts& products, int feature_tiles, cudaStream_t stream) {
  const auto kernel = joined_products<kSummed>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  const auto row_tiles = static_cast<unsigned>((products.num_rows + kJoinedRows - 1) / kJoinedRows);
  if (row_tiles == 0 || feature_tiles == 0) return;
  launch_early(kernel,
               {{static_cast<unsigned>(feature_tiles), row_tiles}, kThreads, sizeof(Shared)},
               stream, products);
}

}  // namespace

void launch_joined_gradients(const JoinedGradients& gradients, cudaStream_t stream) {
  if (gradients.count == 0) return;
  check(cudaFuncSetAttribute(joined_gradients, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             sizeof(GradientShared)));
  const auto column_tiles =
      static_cast<unsigned>((gradients.width + kJoinedFeatures - 1) / kJoinedFeatures);
  const auto feature_tiles = static_cast<unsigned>(gradients.first_tile[gradients.count]);
  launch_early(joined_gradients,
               {{column_tiles, feature_tiles}, kGradientThreads, sizeof(GradientShared)}, stream,
               gradients);
}

void launch_joined_products(const JoinedProducts& products, cudaStream_t stream) {
  launch<false>(products, products.first_tile[products.count], stream);
}

void launch_summed_products(const JoinedProducts& products, cudaStream_t stream) {
  launch<true>(products, products.first_tile[1], stream);
}

}  // namespace tessera::cuda
