// A block of threads turns parts of 128 tokens by 64 columns: they wait in registers while their
// scales are found, and lie in shared memory as they are turned, in words of four tokens that are
// swapped so that no bank is met twice. With a scale for every 128 tokens that is all. Where all
// tokens of a group share one, the blocks of a cluster have a group's tokens of 64 columns between
// them and exchange the largest values; the first parts of each stay in registers meanwhile, and
// the rest is read again, mostly from the L2 cache.
#include "ops/cuda/ptx/barrier.cuh"
#include "ops/quantize/fp8_cast.cuh"
#include "ops/quantize_tokens/quantize_tokens_kernels.h"
#include "ops/quantize_tokens/token_blocks.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTokens = static_cast<int>(kTokenBlock);
constexpr int kColumns = 64;
constexpr int kWidth = 8;  // columns that a thread has of a part
constexpr int kAcross = kColumns / kWidth;
constexpr int kRows = kTokens / (kThreads / kAcross);  // and tokens
static_assert(kRows == 4, "a word of E4M3");
constexpr int kWords = kTokens / kRows;  // of a column of a part
constexpr int kKept = 4;                 // parts that stay in registers
constexpr int kMaxCluster = 8;

/// A group's rows, and its first block of tokens.
struct Group {
  int64_t first_row = 0;
  int64_t end_row = 0;
  int64_t first_block = 0;

  __device__ int num_blocks() const {
    return static_cast<int>(token_blocks_of(end_row - first_row));
  }
};

__device__ __forceinline__ Group load_group(const TokenRows& rows, int group) {
  if (rows.offsets == nullptr) return {0, rows.num_rows, 0};
  const int64_t first = rows.offsets[group];
  return {first, rows.offsets[group + 1], first_token_block(first, group)};
}

/// The group that has a block of tokens; one without rows where none has. By all threads.
__device__ __forceinline__ Group find_group(const TokenRows& rows, int64_t block) {
  __shared__ Group found;
  if (threadIdx.x == 0) found = {};
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < rows.num_groups; i += kThreads) {
    const Group group = load_group(rows, i);
    if (group.first_block <= block && block < group.first_block + group.num_blocks()) found = group;
  }
  __syncthreads();
  return found;
}

/// This thread's place in a part: tokens from `row` on, columns from `column` on.
__device__ __forceinline__ int own_row() {
  return static_cast<int>(threadIdx.x) / kAcross * kRows;
}
__device__ __forceinline__ int own_column() {
  return static_cast<int>(threadIdx.x) % kAcross * kWidth;
}

using Part = Pack<BFloat16, kWidth>[kRows];

/// A thread's values of the part that begins at `row` of x and `column`, zeros behind the group.
__device__ __forceinline__ void load_part(const TokenRows& rows, int64_t row, int64_t end_row,
                                          int64_t column, Part& part) {
  const BFloat16* const x = static_cast<const BFloat16*>(rows.x) + column + own_column();
  const bool is_column = column + own_column() < rows.num_columns;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t own = row + own_row() + r;
    part[r] = is_column && own < end_row ? load_pack<kWidth>(x + own * rows.num_columns)
                                         : Pack<BFloat16, kWidth>{};
  }
}

/// The largest magnitudes of this thread's columns. A NaN is left out.
struct Largest {
  __nv_bfloat162 at[kWidth / 2] = {};

  __device__ __forceinline__ void add(const Part& part) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const auto* const pairs = reinterpret_cast<const __nv_bfloat162*>(&part[r]);
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) at[i] = __hmax2(at[i], __habs2(pairs[i]));
    }
  }
};

/// Those of the block of threads, a column's in the thread of its number, 0 in other threads.
__device__ __forceinline__ float find_largest(const Largest& own) {
  __shared__ alignas(16) float of_warps[kWarps][kColumns];
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) {
    __nv_bfloat162 pair = own.at[i];
#pragma unroll
    for (int step = kAcross; step < 32; step *= 2)
      pair = __hmax2(pair, __shfl_xor_sync(~0U, pair, step));
    if (lane < kAcross)
      *reinterpret_cast<float2*>(&of_warps[threadIdx.x / 32][own_column() + 2 * i]) =
          __bfloat1622float2(pair);
  }
  __syncthreads();
  float largest = 0;
  if (threadIdx.x < kColumns) {
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) largest = fmaxf(largest, of_warps[warp][threadIdx.x]);
  }
  return largest;
}

/// What this thread's columns are multiplied by, of the largest values that threads have; the
/// scales are written to `scales`, where that is not null, of which `num_columns` are left.
__device__ __forceinline__ Floats<kWidth> share_factors(float largest, float* scales,
                                                        int64_t num_columns) {
  __shared__ alignas(16) float factors[kColumns];
  if (threadIdx.x < kColumns) {
    const float scale = scale_for<true>(largest);
    factors[threadIdx.x] = __frcp_rn(scale);
    if (scales != nullptr && threadIdx.x < num_columns) scales[threadIdx.x] = scale;
  }
  __syncthreads();
  Floats<kWidth> own;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) own[i] = factors[own_column() + i];
  return own;
}

/// Columns of a part, each as 8 chunks of 16 tokens.
using Tile = uint4[kColumns][kWords / 4];

/// Casts a part, of which `num_rows` tokens are the group's, and writes it to block `block` of y.
__device__ __forceinline__ void turn(const TokenRows& rows, Tile& tile, const Part& part,
                                     const Floats<kWidth>& factors, int64_t num_rows, int64_t block,
                                     int64_t y_columns, int64_t column) {
  const int thread = static_cast<int>(threadIdx.x);
  const int across = thread % kAcross;
  const int64_t own_rows = num_rows - own_row();
  // Of a column with an infinity even a zero would become NaN.
  const uint32_t mask = own_rows >= kRows ? ~0U : own_rows <= 0 ? 0U : (1U << 8 * own_rows) - 1;
  auto* const words = reinterpret_cast<uint32_t*>(&tile);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    Floats<kRows> scaled;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      scaled[r] = __fmul_rn(static_cast<float>(part[r].at[i]), factors[i]);
    const Pack<uint8_t, kRows> codes = to_fp8<true>(scaled);
    const int word = (thread / kAcross) ^ (4 * across);
    words[(across * kWidth + i) * kWords + word] = reinterpret_cast<const uint32_t&>(codes) & mask;
  }
  __syncthreads();
  constexpr int kChunks = kWords / 4;
#pragma unroll
  for (int at = thread; at < kColumns * kChunks; at += kThreads) {
    const int of_column = at / kChunks;
    const int chunk = at % kChunks;
    if (column + of_column >= rows.num_columns) continue;
    uint8_t* const y = rows.y + (column + of_column) * y_columns + block * kTokens + chunk * 16;
    *reinterpret_cast<uint4*>(y) = tile[of_column][chunk ^ (of_column / kWidth)];
  }
}

/// A scale for 128 tokens: a part a block of threads.
__global__ void __launch_bounds__(kThreads)
    quantize_blocks_kernel(const TokenRows rows, int64_t y_columns) {
  __shared__ Tile tile;
  const int64_t block = blockIdx.y;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns;
  const Group group = find_group(rows, block);
  if (group.first_row == group.end_row) return;
  const int64_t row = group.first_row + (block - group.first_block) * kTokens;
  Part part;
  load_part(rows, row, group.end_row, column, part);
  Largest largest;
  largest.add(part);
  const Floats<kWidth> factors =
      share_factors(find_largest(largest), rows.scales + block * rows.num_columns + column,
                    rows.num_columns - column);
  turn(rows, tile, part, factors, group.end_row - row, block, y_columns, column);
}

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  return size;
}

/// A value in the shared memory of another block of the cluster, at the place of `own`.
__device__ __forceinline__ float load_from_rank(const float* own, uint32_t rank) {
  float value;
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [remote];\n"
      "}\n"
      : "=f"(value)
      : "r"(shared_address(own)), "r"(rank)
      : "memory");
  return value;
}

/// The largest of the values that the threads of one number have in the blocks of a cluster.
__device__ __forceinline__ float find_largest_of_cluster(float own) {
  __shared__ float of_block[kColumns];
  if (threadIdx.x < kColumns) of_block[threadIdx.x] = own;
  __syncthreads();
  sync_cluster();
  if (threadIdx.x < kColumns) {
    for (uint32_t rank = 0; rank < cluster_size(); ++rank)
      own = fmaxf(own, load_from_rank(&of_block[threadIdx.x], rank));
  }
  __syncthreads();
  sync_cluster();  // no block ends while others read of it
  return own;
}

/// A scale for a group's tokens: 64 columns of a group a cluster, whose blocks take parts in turns.
__global__ void __launch_bounds__(kThreads, 2)
    quantize_groups_kernel(const TokenRows rows, int64_t y_columns) {
  __shared__ Tile tiles[2];
  const int rank = static_cast<int>(cluster_rank());
  const int step = static_cast<int>(cluster_size());
  const int64_t column = static_cast<int64_t>(blockIdx.x / step) * kColumns;
  const Group group = load_group(rows, static_cast<int>(blockIdx.y));
  const int num_blocks = group.num_blocks();
  const auto load = [&](int block, Part& part) {
    load_part(rows, group.first_row + int64_t{block} * kTokens, group.end_row, column, part);
  };
  Part kept[kKept];
  Largest largest;
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    if (rank + i * step < num_blocks) load(rank + i * step, kept[i]);
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    if (rank + i * step < num_blocks) largest.add(kept[i]);
  const int first_left = rank + kKept * step;
#pragma unroll 2
  for (int block = first_left; block < num_blocks; block += step) {
    Part part;
    load(block, part);
    largest.add(part);
  }
  const float of_cluster = find_largest_of_cluster(find_largest(largest));
  float* const scales = rows.scales + blockIdx.y * rows.num_columns + column;
  const Floats<kWidth> factors =
      share_factors(of_cluster, rank == 0 ? scales : nullptr, rows.num_columns - column);
  // Two tiles, so that threads wait for each other but once a part.
  int turns = 0;
  const auto turn_block = [&](int block, const Part& part) {
    const int64_t left = group.end_row - group.first_row - int64_t{block} * kTokens;
    turn(rows, tiles[turns++ % 2], part, factors, left, group.first_block + block, y_columns,
         column);
  };
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    if (rank + i * step < num_blocks) turn_block(rank + i * step, kept[i]);
  for (int block = first_left; block < num_blocks; block += step) {
    Part part;
    load(block, part);
    turn_block(block, part);
  }
}

/// Blocks of a cluster that keep a group of average size in their registers, and a quarter more.
int choose_cluster(const TokenRows& rows) {
  const int64_t blocks = divide_up(rows.num_rows, int64_t{rows.num_groups} * kTokens);
  int cluster = 1;
  while (cluster < kMaxCluster && 4 * cluster * kKept < 5 * blocks) cluster *= 2;
  return cluster;
}

void launch_groups(const TokenRows& rows, int64_t y_columns, cudaStream_t stream) {
  const int cluster = choose_cluster(rows);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = {static_cast<unsigned>(divide_up(rows.num_columns, kColumns) * cluster),
                    static_cast<unsigned>(rows.num_groups)};
  config.blockDim = kThreads;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, quantize_groups_kernel, rows, y_columns));
}

}  // namespace

void launch_quantize_tokens(const TokenRows& rows, cudaStream_t stream) {
  const int64_t blocks = num_token_blocks(rows.num_rows, rows.num_groups);
  if (!rows.by_block) return launch_groups(rows, blocks * kTokenBlock, stream);
  if (blocks == 0) return;
  const dim3 parts(static_cast<unsigned>(divide_up(rows.num_columns, kColumns)),
                   static_cast<unsigned>(blocks));
  quantize_blocks_kernel<<<parts, kThreads, 0, stream>>>(rows, blocks * kTokenBlock);
  check(cudaGetLastError());
}

}  // namespace tessera::cuda
