// The router's logits on the tensor cores, to the precision of F32: BF16 x by the weight's three
// BF16 terms, whose products are exact in F32. Persistent clusters of two blocks, each with 128
// tokens, share the terms; x is read once for each tile of experts.
#include <cuda_bf16.h>

#include "ops/cuda/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/pipeline/ring_cursor.cuh"
#include "ops/cuda/pipeline/warp_roles.cuh"
#include "ops/cuda/ptx/bulk_copy.cuh"
#include "ops/cuda/ptx/warpgroup_product.cuh"
#include "ops/router/router_kernels.h"
#include "ops/router/router_terms.cuh"

namespace tessera::cuda {
namespace {

using Value = __nv_bfloat16;

constexpr int kTokens = kRouterTileTokens;  // of a block: 64 of each warpgroup
constexpr int kReduction = 64;
/// Stages whose products the tensor cores add up, which they do less exactly than F32 sums are
/// made: where there are more, the sums of this many are added in F32.
constexpr int kExactStages = 16;
/// Up to this many the error stays within twice that of a plain sum in F32.
constexpr int kMostStagesAtOnce = 24;
using Roles = WarpRoles<40, 232>;
constexpr int kThreads = Roles::kThreads;
/// By which the second warpgroup begins later, so that one multiplies while the other stores.
constexpr int kApartCycles = 700;
/// Tiles of this many have all the experts whose terms a cluster may make itself.
constexpr int kFewExperts = 32;
static_assert(kRouterFewExperts <= kFewExperts);

/// Orders ordinary writes of global memory before TMA's reads.
__device__ __forceinline__ void fence_global_for_async() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

template <int kExperts>
struct Stage {
  Value x[kTokens * kReduction];
  Value terms[3 * kExperts * kReduction];
};

template <int kExperts>
constexpr int kStages = (kMaxShared - 1024) / static_cast<int>(sizeof(Stage<kExperts>));

template <int kExperts>
struct Shared {
  Stage<kExperts> stages[kStages<kExperts>];
  Barrier full[kStages<kExperts>];
  Barrier empty[kStages<kExperts>];
};

/// A tile of a cluster: its first block's tokens, then its second one's.
struct Tile {
  int64_t token;
  int expert;
};

/// Calls run(tile) for each tile of this cluster. Tiles of the same tokens are neighbours.
template <int kExperts, typename Run>
__device__ __forceinline__ void for_each_tile(const RouterTensorLogits& p, Run run) {
  const int expert_tiles = (p.num_experts + kExperts - 1) / kExperts;
  const int64_t token_tiles = (p.num_tokens + 2 * kTokens - 1) / (2 * kTokens);
  const int rank = static_cast<int>(cluster_rank());
  for (int64_t i = blockIdx.x / 2; i < token_tiles * expert_tiles; i += gridDim.x / 2)
    run(Tile{(2 * (i / expert_tiles) + rank) * kTokens,
             static_cast<int>(i % expert_tiles) * kExperts});
}

__device__ __forceinline__ int num_stages(const RouterTensorLogits& p) {
  return (p.hidden_size + kReduction - 1) / kReduction;
}

/// By all threads: writes the cluster's own copy of the terms, where none are given. TMA reads them
/// after the cluster's next barrier.
__device__ __forceinline__ void write_own_terms(const RouterTensorLogits& p) {
  constexpr int kAtOnce = 4;  // read before any is waited for
  constexpr int kStep = 2 * kThreads;
  if (p.own.count == 0) return;
  RouterWeight own = p.own;
  own.terms_3EH = static_cast<Value*>(own.terms_3EH) + blockIdx.x / 2 * (3 * own.count);
  const int64_t begin = static_cast<int64_t>(cluster_rank()) * kThreads + threadIdx.x;
  for (int64_t first = begin; first < own.count; first += kAtOnce * kStep) {
    float values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = first + i * kStep;
      values[i] = at < own.count ? own.values_EH[at] : 0.0F;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = first + i * kStep;
      if (at < own.count) write_weight_terms(own, at, values[i]);
    }
  }
  fence_global_for_async();
}

/// By one thread: brings the block's tokens, and to both blocks its half of the terms.
template <int kExperts>
__device__ void produce(Shared<kExperts>& shared, const RouterTensorLogits& p) {
  constexpr int kHalf = kExperts / 2;
  const int own = static_cast<int>(cluster_rank()) * kHalf;
  int copy = 0;  // its first row
  if constexpr (kExperts == kFewExperts) {
    if (p.own.count > 0) {
      copy = static_cast<int>(blockIdx.x / 2) * 3 * p.num_experts;
      fence_global_for_async();
    }
  }
  RingCursor<kStages<kExperts>> cursor;
  for_each_tile<kExperts>(p, [&](const Tile& tile) {
    for (int s = 0; s < num_stages(p); ++s) {
      Stage<kExperts>& stage = shared.stages[cursor.stage];
      Barrier* const full = &shared.full[cursor.stage];
      shared.empty[cursor.stage].wait(cursor.parity ^ 1);
      full->arrive_and_expect(sizeof(Stage<kExperts>));
      load_box(stage.x, &p.x, {s * kReduction, static_cast<int>(tile.token)}, full);
      for (int term = 0; term < 3; ++term)
        load_box_to_all(stage.terms + (term * kExperts + own) * kReduction, &p.terms,
                        {s * kReduction, copy + term * p.num_experts + tile.expert + own}, full, 3);
      cursor.advance();
    }
  });
}

/// Two neighbouring logits of a token.
__device__ __forceinline__ void store_two(float* to_E, int expert, int num_experts, float2 values) {
  if (num_experts % 2 == 0) {
    if (expert < num_experts) *reinterpret_cast<float2*>(to_E + expert) = values;
    return;
  }
  if (expert < num_experts) to_E[expert] = values.x;
  if (expert + 1 < num_experts) to_E[expert + 1] = values.y;
}

/// Lets both blocks' producers fill a stage again.
template <typename Shared>
__device__ __forceinline__ void release(Shared& shared, int stage) {
  const int thread = threadIdx.x % kWarpgroup;
  if (thread < 2) shared.empty[stage].arrive_at(thread);
}

/// The products of one tile: those of the first terms, and apart from them, as they are smaller,
/// those of the second and the third terms; see WarpgroupProduct for their order. kLong: there are
/// many stages, and for lack of registers second and third terms share theirs.
template <int kExperts, bool kLong>
__device__ __forceinline__ void multiply(Shared<kExperts>& shared, const RouterTensorLogits& p,
                                         const Tile& tile, int group,
                                         RingCursor<kStages<kExperts>>& cursor) {
  constexpr TileMajor kMajor = TileMajor::kReduction;
  constexpr int kValues = kExperts / 2;
  constexpr int kOthers = kLong ? kExperts : 2 * kExperts;
  constexpr uint64_t kNextTerm = kExperts * kReduction * sizeof(Value) / 16;
  float others[kOthers / 2], total[kLong ? kValues : 1], first[kValues];
#pragma unroll
  for (float& value : others) value = 0;
#pragma unroll
  for (float& value : total) value = 0;
  const auto add_stages = [&](int count) __attribute__((always_inline)) {
    int last = 0;
    for (int s = 0; s < count; ++s) {
      const Stage<kExperts>& stage = shared.stages[cursor.stage];
      uint64_t x = describe_tile<kMajor>(stage.x + group * 64 * kReduction, 0);
      uint64_t terms = describe_tile<kMajor>(stage.terms, 0);
      shared.full[cursor.stage].wait(cursor.parity);
      begin_products();
#pragma unroll
      for (int k = 0; k < kReduction / 16; ++k) {
        WarpgroupProduct<kExperts, kMajor, kMajor>::run(first, x, terms, true);
        WarpgroupProduct<kOthers, kMajor, kMajor>::run(others, x, terms + kNextTerm, true);
        if constexpr (kLong)
          WarpgroupProduct<kOthers, kMajor, kMajor>::run(others, x, terms + 2 * kNextTerm, true);
        x += kNextReduction<kMajor>;
        terms += kNextReduction<kMajor>;
      }
      commit_products();
      wait_products<1>();
      if (s > 0) release(shared, last);
      last = cursor.stage;
      cursor.advance();
    }
    wait_products<0>();
    fence_values(first);
    fence_values(others);
    if (count > 0) release(shared, last);
  };
  const int stages = num_stages(p);
  if constexpr (kLong) {
    for (int begin = 0; begin < stages; begin += kExactStages) {
#pragma unroll
      for (float& value : first) value = 0;
      add_stages(min(kExactStages, stages - begin));
#pragma unroll
      for (int i = 0; i < kValues; ++i) total[i] += first[i];
    }
  } else {
#pragma unroll
    for (float& value : first) value = 0;
    add_stages(stages);
  }

  // The smallest first.
  const auto sum_of = [&](int i) {
    if constexpr (kLong) return others[i] + total[i];
    return others[kOthers / 2 - kValues + i] + others[i] + first[i];
  };
  const int thread = threadIdx.x % kWarpgroup;
  const int64_t row = tile.token + group * 64 + thread / 32 * 16 + thread % 32 / 4;
  const int column = tile.expert + 2 * (thread % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= p.num_tokens) continue;
    float* const logits_E = p.logits_TE + (row + 8 * half) * p.num_experts;
#pragma unroll
    for (int j = 0; j < kExperts / 8; ++j) {
      const int at = 4 * j + 2 * half;
      store_two(logits_E, column + 8 * j, p.num_experts, {sum_of(at), sum_of(at + 1)});
    }
  }
}

template <int kExperts, bool kLong>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    multiply_terms(const __grid_constant__ RouterTensorLogits p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kExperts>*>(memory);
  if (threadIdx.x == 0) {
    prefetch(&p.x);
    prefetch(&p.terms);
    for (int s = 0; s < kStages<kExperts>; ++s) {
      shared.full[s].init(1);
      shared.empty[s].init(4);
    }
    fence_barrier_init();
  }
  wait_for_earlier();
  let_next_begin();  // all blocks run at once, so the next kernel's take no place of theirs
  if constexpr (kExperts == kFewExperts) write_own_terms(p);
  __syncthreads();
  sync_cluster();
  if (threadIdx.x < kWarpgroup) {
    Roles::begin_feeding();
    if (threadIdx.x == 0) produce<kExperts>(shared, p);
  } else {
    Roles::begin_multiplying();
    const int group = threadIdx.x / kWarpgroup - 1;
    if (group == 1) spend_cycles(kApartCycles);
    RingCursor<kStages<kExperts>> cursor;
    for_each_tile<kExperts>(
        p, [&](const Tile& tile) { multiply<kExperts, kLong>(shared, p, tile, group, cursor); });
  }
  __syncwarp();  // of the single thread's warp
  sync_cluster();
}

template <int kExperts>
void launch(const RouterTensorLogits& p, cudaStream_t stream) {
  static_assert(sizeof(Shared<kExperts>) <= kMaxShared);
  const bool is_long = p.hidden_size > kMostStagesAtOnce * kReduction;
  const auto kernel = is_long ? multiply_terms<kExperts, true> : multiply_terms<kExperts, false>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             sizeof(Shared<kExperts>)));
  const int64_t tiles = (p.num_tokens + 2 * kTokens - 1) / (2 * kTokens) *
                        ((p.num_experts + kExperts - 1) / kExperts);
  const int64_t clusters = tiles < p.num_sms / 2 ? tiles : p.num_sms / 2;
  launch_early(kernel, {static_cast<unsigned>(2 * clusters), kThreads, sizeof(Shared<kExperts>)},
               stream, p);
}

}  // namespace

void launch_router_tensor_logits(const RouterTensorLogits& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  switch (router_tile_experts(p.num_tokens, p.num_experts, p.num_sms)) {
    case 32:
      return launch<32>(p, stream);
    case 64:
      return launch<64>(p, stream);
    case 96:
      return launch<96>(p, stream);
    default:
      return launch<128>(p, stream);
  }
}

}  // namespace tessera::cuda
