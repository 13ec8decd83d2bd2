// A block of threads turns parts of 128 tokens by 128 bytes of columns: they wait in registers, as
// they were read, while their scales are found, and lie in shared memory as they are turned, in
// words of four tokens that are swapped so that no bank is met twice. With a scale for every 128
// tokens that is all. Where all tokens of a group share one, the blocks of a cluster have a group's
// tokens of these columns between them and exchange the largest values; the first parts of each
// stay in registers meanwhile, and the rest is read again, mostly from the L2 cache.
#include "ops/cuda/fp8_cast.cuh"
#include "ops/cuda/ptx/barrier.cuh"
#include "ops/quantize_tokens/quantize_tokens_kernels.h"
#include "ops/quantize_tokens/token_turn.cuh"

namespace tessera::cuda {
namespace {

using namespace token_parts;

constexpr int kWarps = kThreads / 32;
constexpr int kKept = 2;  // parts that stay in registers
constexpr int kMaxCluster = 8;

/// Blocks of threads that an SM has registers for, where parts are kept.
template <Tokens kTokensOf>
constexpr int kBlocksOfSm = kIsCoded<kTokensOf> ? 3 : 4;

/// The largest magnitudes of this thread's columns. A NaN is left out.
template <Tokens kTokensOf>
struct Largest {
  __nv_bfloat162 at[kWidth<kTokensOf> / 2] = {};

  __device__ __forceinline__ void add(Part<kTokensOf>& part) {
    if constexpr (kIsCoded<kTokensOf>) {
      part.keep_codes();
      const Shares<kTokensOf> shares(part);
      if (__all_sync(~0U, shares.are_exact)) {
        add_shares(part, shares);
      } else {
        add_all(part);
      }
      part.keep_codes();
    } else {
      add_all(part);
    }
  }

 private:
  __device__ __forceinline__ void add_all(const Part<kTokensOf>& part) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kWidth<kTokensOf> / 2; ++i)
        at[i] = __hmax2(at[i], part.magnitudes(r, 2 * i));
    }
  }

  __device__ __forceinline__ void add_shares(const Part<kTokensOf>& part,
                                             const Shares<kTokensOf>& shares) {
#pragma unroll
    for (int word = 0; word < kWidth<kTokensOf> / 4; ++word) {
      __half2 most[2] = {};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        __half2 own[2];
        shares.decode(part.rows[r].at[word] & 0x7F7F7F7FU, r, own);
#pragma unroll
        for (int i = 0; i < 2; ++i) most[i] = __hmax2(most[i], own[i]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 two = __half22float2(most[i]);
        at[2 * word + i] =
            __hmax2(at[2 * word + i], __float22bfloat162_rn({__fmul_rn(two.x, shares.largest),
                                                             __fmul_rn(two.y, shares.largest)}));
      }
    }
  }
};

/// Those of the block of threads, a column's in the thread of its number, 0 in other threads.
template <Tokens kTokensOf>
__device__ __forceinline__ float find_largest(const Largest<kTokensOf>& own) {
  using Pairs = __nv_bfloat162[kWidth<kTokensOf> / 2];
  __shared__ alignas(16) BFloat16 of_warps[kWarps][kColumns<kTokensOf>];
  alignas(16) Pairs pairs;
#pragma unroll
  for (int i = 0; i < kWidth<kTokensOf> / 2; ++i) {
    pairs[i] = own.at[i];
#pragma unroll
    for (int step = kAcross; step < 32; step *= 2)
      pairs[i] = __hmax2(pairs[i], __shfl_xor_sync(~0U, pairs[i], step));
  }
  const int thread = static_cast<int>(threadIdx.x);
  if (thread % 32 < kAcross) {
    auto* const to = reinterpret_cast<uint4*>(&of_warps[thread / 32][own_column<kTokensOf>()]);
#pragma unroll
    for (int i = 0; i < kWidth<kTokensOf> / 8; ++i)
      to[i] = reinterpret_cast<const uint4*>(pairs)[i];
  }
  __syncthreads();
  float largest = 0;
  if (thread < kColumns<kTokensOf>) {
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp)
      largest = fmaxf(largest, __bfloat162float(of_warps[warp][thread]));
  }
  return largest;
}

/// A scale for 128 tokens: a part a block of threads.
template <Tokens kTokensOf, bool kGathers>
__global__ void __launch_bounds__(kThreads)
    quantize_blocks_kernel(const TokenRows rows, int64_t y_columns) {
  __shared__ Tile<kTokensOf> tile;
  __shared__ Factors<kTokensOf> factors;
  const int64_t block = blockIdx.y;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns<kTokensOf>;
  const Group group = find_group(rows, block);
  if (group.first_row == group.end_row) return;
  const int number = static_cast<int>(block - group.first_block);
  const Source<kTokensOf, kGathers> source(rows, group, column);
  Part<kTokensOf> part;
  source.load(number, part);
  Largest<kTokensOf> largest;
  largest.add(part);
  share_factors<kTokensOf>(find_largest(largest), factors,
                           rows.scales + block * rows.num_columns + column,
                           rows.num_columns - column);
  turn(part, factors, Powers<kTokensOf>(factors), source.rows_left(number), tile,
       Target<kTokensOf>(rows, group, column, y_columns), number);
}

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  return size;
}

/// Writes a value to the shared memory of a block of the cluster, at the place of `own` here.
__device__ __forceinline__ void store_to_rank(const float* own, uint32_t rank, float value) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.f32 [remote], %2;\n"
      "}\n" ::"r"(shared_address(own)),
      "r"(rank), "f"(value)
      : "memory");
}

__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// The largest of the values that the threads of one number have in the blocks of a cluster, all of
/// which have called arrive_at_cluster before.
template <int kNumColumns>
__device__ __forceinline__ float find_largest_of_cluster(float own) {
  __shared__ float of_ranks[kMaxCluster][kNumColumns];
  const uint32_t size = cluster_size();
  wait_for_cluster();  // all have begun
  if (threadIdx.x < kNumColumns) {
    const uint32_t rank = cluster_rank();
    for (uint32_t to = 0; to < size; ++to) store_to_rank(&of_ranks[rank][threadIdx.x], to, own);
  }
  arrive_at_cluster();
  wait_for_cluster();
  if (threadIdx.x < kNumColumns) {
    for (uint32_t rank = 0; rank < size; ++rank) own = fmaxf(own, of_ranks[rank][threadIdx.x]);
  }
  return own;
}

/// A scale for a group's tokens: a part's columns of a group a cluster, whose blocks take parts in
/// turns.
template <Tokens kTokensOf, bool kGathers>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm<kTokensOf>)
    quantize_groups_kernel(const TokenRows rows, int64_t y_columns) {
  __shared__ Tile<kTokensOf> tiles[2];
  __shared__ Factors<kTokensOf> factors;
  arrive_at_cluster();
  const int rank = static_cast<int>(cluster_rank());
  const int step = static_cast<int>(cluster_size());
  const int64_t column = static_cast<int64_t>(blockIdx.x / step) * kColumns<kTokensOf>;
  const Group group = load_group(rows, static_cast<int>(blockIdx.y));
  const int num_blocks = group.num_blocks();
  const Source<kTokensOf, kGathers> source(rows, group, column);
  Part<kTokensOf> kept[kKept];
  Largest<kTokensOf> largest;
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    if (rank + i * step < num_blocks) source.load(rank + i * step, kept[i]);
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    if (rank + i * step < num_blocks) largest.add(kept[i]);
  const int first_left = rank + kKept * step;
#pragma unroll 1
  for (int block = first_left; block < num_blocks; block += step) {
    Part<kTokensOf> part;
    source.load(block, part);
    largest.add(part);
  }
  const float of_cluster = find_largest_of_cluster<kColumns<kTokensOf>>(find_largest(largest));
  float* const scales = rows.scales + blockIdx.y * rows.num_columns + column;
  share_factors<kTokensOf>(of_cluster, factors, rank == 0 ? scales : nullptr,
                           rows.num_columns - column);
  const Target<kTokensOf> target(rows, group, column, y_columns);
  const Powers<kTokensOf> powers(factors);
  // Two tiles, so that threads wait for each other but once a part.
  int turns = 0;
  const auto turn_next = [&](int number, const Part<kTokensOf>& part) {
    turn(part, factors, powers, source.rows_left(number), tiles[turns++ % 2], target, number);
  };
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    if (rank + i * step < num_blocks) turn_next(rank + i * step, kept[i]);
  for (int block = first_left; block < num_blocks; block += step) {
    Part<kTokensOf> part;
    source.load(block, part);
    turn_next(block, part);
  }
}

/// Blocks of a cluster that keep a group of average size in their registers.
int choose_cluster(const TokenRows& rows) {
  const int64_t blocks = divide_up(rows.num_rows, int64_t{rows.num_groups} * kTokens);
  int cluster = 1;
  while (cluster < kMaxCluster && cluster * kKept < blocks) cluster *= 2;
  return cluster;
}

template <Tokens kTokensOf, bool kGathers>
void launch_groups(const TokenRows& rows, int64_t y_columns, cudaStream_t stream) {
  const int cluster = choose_cluster(rows);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = {
      static_cast<unsigned>(divide_up(rows.num_columns, kColumns<kTokensOf>) * cluster),
      static_cast<unsigned>(rows.num_groups)};
  config.blockDim = kThreads;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, quantize_groups_kernel<kTokensOf, kGathers>, rows, y_columns));
}

template <Tokens kTokensOf, bool kGathers>
void launch_of(const TokenRows& rows, cudaStream_t stream) {
  const int64_t blocks = num_token_blocks(rows.num_rows, rows.num_groups);
  if (!rows.by_block) return launch_groups<kTokensOf, kGathers>(rows, blocks * kTokenBlock, stream);
  if (blocks == 0) return;
  const dim3 parts(static_cast<unsigned>(divide_up(rows.num_columns, kColumns<kTokensOf>)),
                   static_cast<unsigned>(blocks));
  quantize_blocks_kernel<kTokensOf, kGathers>
      <<<parts, kThreads, 0, stream>>>(rows, blocks * kTokenBlock);
  check(cudaGetLastError());
}

}  // namespace

void launch_quantize_tokens(const TokenRows& rows, cudaStream_t stream) {
  const auto launch = [&]<Tokens kTokensOf>() {
    rows.source == nullptr ? launch_of<kTokensOf, false>(rows, stream)
                           : launch_of<kTokensOf, true>(rows, stream);
  };
  switch (rows.dtype) {
    case DType::kE4M3:
      return launch.template operator()<Tokens::kE4m3>();
    case DType::kE5M2:
      return launch.template operator()<Tokens::kE5m2>();
    default:
      return launch.template operator()<Tokens::kBf16>();
  }
}

}  // namespace tessera::cuda
