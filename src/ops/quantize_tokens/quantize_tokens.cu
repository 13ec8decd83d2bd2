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
constexpr int kKept = 3;                 // parts that stay in registers
constexpr int kMaxCluster = 8;

/// A group's rows, and its first block of tokens.
struct Group {
  int64_t first_row;
  int64_t end_row;
  int64_t first_block;

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

/// This thread's place in a part: tokens from own_row() on, columns from own_column() on.
__device__ __forceinline__ int own_row() {
  return static_cast<int>(threadIdx.x) / kAcross * kRows;
}
__device__ __forceinline__ int own_column() {
  return static_cast<int>(threadIdx.x) % kAcross * kWidth;
}

using Part = Pack<BFloat16, kWidth>[kRows];

/// Elements of x as they are read.
enum class Tokens { kBf16, kE4m3, kE5m2 };

/// What a thread reads of a group's parts, which lie one below the other. What FP8 stands for is
/// held by BF16 exactly.
template <Tokens kTokensOf>
struct Source {
  using Element = std::conditional_t<kTokensOf == Tokens::kBf16, BFloat16, uint8_t>;

  const Element* first;
  const float* scales;  // of this thread's columns of the first row
  int scales_apart;     // from one row to the next
  int64_t num_columns;
  int num_rows;  // of the group, from this thread's first one on; none beyond the last column

  __device__ __forceinline__ Source(const TokenRows& rows, const Group& group, int64_t column)
      : first(static_cast<const Element*>(rows.x) +
              (group.first_row + own_row()) * rows.num_columns + column + own_column()),
        num_columns(rows.num_columns),
        num_rows(column + own_column() < rows.num_columns
                     ? static_cast<int>(group.end_row - group.first_row) - own_row()
                     : 0) {
    if constexpr (kTokensOf != Tokens::kBf16) {
      scales_apart = static_cast<int>(divide_up(rows.num_columns, rows.columns_of_scale));
      scales = rows.row_scales + (group.first_row + own_row()) * scales_apart +
               (column + own_column()) / rows.columns_of_scale;
    }
  }

  /// This thread's tokens that the group has in a part, and perhaps in those behind.
  __device__ __forceinline__ int rows_left(int part) const { return num_rows - part * kTokens; }

  /// Zeros behind the group's last token.
  __device__ __forceinline__ void load(int part, Part& to) const {
    const Element* const from = first + int64_t{part} * kTokens * num_columns;
    const int left = rows_left(part);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      to[r] = {};
      if (r >= left) continue;
      const Pack<Element, kWidth> pack = load_pack<kWidth>(from + r * num_columns);
      if constexpr (kTokensOf == Tokens::kBf16) {
        to[r] = pack;
      } else {
        const float scale = scales[(int64_t{part} * kTokens + r) * scales_apart];
        to[r] = to_bf16(from_fp8<kTokensOf == Tokens::kE4m3>(pack, scale));
      }
    }
  }
};

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

/// Where a thread writes a group's parts, which lie side by side: 16 tokens of two columns each.
struct Target {
  static constexpr int kChunks = kWords / 4;
  static constexpr int kColumnsApart = kThreads / kChunks;

  uint8_t* first;
  int64_t apart;    // from one of the two columns to the other
  int num_columns;  // that there are from the first on

  __device__ __forceinline__ Target(const TokenRows& rows, const Group& group, int64_t column,
                                    int64_t y_columns)
      : first(rows.y + (column + threadIdx.x / kChunks) * y_columns + group.first_block * kTokens +
              threadIdx.x % kChunks * 16),
        apart(kColumnsApart * y_columns),
        num_columns(static_cast<int>(rows.num_columns - column) -
                    static_cast<int>(threadIdx.x) / kChunks) {}

  __device__ __forceinline__ void store(int part, const Tile& tile) const {
    const int chunk = static_cast<int>(threadIdx.x) % kChunks;
    uint8_t* to = first + int64_t{part} * kTokens;
#pragma unroll
    for (int i = 0; i < kColumns / kColumnsApart; ++i, to += apart) {
      const int column = static_cast<int>(threadIdx.x) / kChunks + i * kColumnsApart;
      if (i * kColumnsApart < num_columns)
        *reinterpret_cast<uint4*>(to) = tile[column][chunk ^ (column / kWidth)];
    }
  }
};

/// Casts a part, of which this thread has `num_rows` tokens, and writes it.
__device__ __forceinline__ void turn(const Part& part, const Floats<kWidth>& factors, int num_rows,
                                     Tile& tile, const Target& to, int number) {
  const int thread = static_cast<int>(threadIdx.x);
  const int across = thread % kAcross;
  // Of a column with an infinity even a zero would become NaN.
  const uint32_t mask = num_rows >= kRows ? ~0U : num_rows <= 0 ? 0U : (1U << 8 * num_rows) - 1;
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
  to.store(number, tile);
}

/// A scale for 128 tokens: a part a block of threads.
template <Tokens kTokensOf>
__global__ void __launch_bounds__(kThreads)
    quantize_blocks_kernel(const TokenRows rows, int64_t y_columns) {
  __shared__ Tile tile;
  const int64_t block = blockIdx.y;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns;
  const Group group = find_group(rows, block);
  if (group.first_row == group.end_row) return;
  const int number = static_cast<int>(block - group.first_block);
  const Source<kTokensOf> source(rows, group, column);
  Part part;
  source.load(number, part);
  Largest largest;
  largest.add(part);
  const Floats<kWidth> factors =
      share_factors(find_largest(largest), rows.scales + block * rows.num_columns + column,
                    rows.num_columns - column);
  turn(part, factors, source.rows_left(number), tile, Target(rows, group, column, y_columns),
       number);
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
template <Tokens kTokensOf>
__global__ void __launch_bounds__(kThreads, 2)
    quantize_groups_kernel(const TokenRows rows, int64_t y_columns) {
  __shared__ Tile tiles[2];
  const int rank = static_cast<int>(cluster_rank());
  const int step = static_cast<int>(cluster_size());
  const int64_t column = static_cast<int64_t>(blockIdx.x / step) * kColumns;
  const Group group = load_group(rows, static_cast<int>(blockIdx.y));
  const int num_blocks = group.num_blocks();
  const Source<kTokensOf> source(rows, group, column);
  Part kept[kKept];
  Largest largest;
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    if (rank + i * step < num_blocks) source.load(rank + i * step, kept[i]);
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    if (rank + i * step < num_blocks) largest.add(kept[i]);
  const int first_left = rank + kKept * step;
#pragma unroll 1
  for (int block = first_left; block < num_blocks; block += step) {
    Part part;
    source.load(block, part);
    largest.add(part);
  }
  const float of_cluster = find_largest_of_cluster(find_largest(largest));
  float* const scales = rows.scales + blockIdx.y * rows.num_columns + column;
  const Floats<kWidth> factors =
      share_factors(of_cluster, rank == 0 ? scales : nullptr, rows.num_columns - column);
  const Target target(rows, group, column, y_columns);
  // Two tiles, so that threads wait for each other but once a part.
  int turns = 0;
  const auto turn_next = [&](int number, const Part& part) {
    turn(part, factors, source.rows_left(number), tiles[turns++ % 2], target, number);
  };
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    if (rank + i * step < num_blocks) turn_next(rank + i * step, kept[i]);
  for (int block = first_left; block < num_blocks; block += step) {
    Part part;
    source.load(block, part);
    turn_next(block, part);
  }
}

/// Blocks of a cluster that keep a group of average size in their registers, and a quarter more.
int choose_cluster(const TokenRows& rows) {
  const int64_t blocks = divide_up(rows.num_rows, int64_t{rows.num_groups} * kTokens);
  int cluster = 1;
  while (cluster < kMaxCluster && 4 * cluster * kKept < 5 * blocks) cluster *= 2;
  return cluster;
}

template <Tokens kTokensOf>
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
  check(cudaLaunchKernelEx(&config, quantize_groups_kernel<kTokensOf>, rows, y_columns));
}

template <Tokens kTokensOf>
void launch_of(const TokenRows& rows, cudaStream_t stream) {
  const int64_t blocks = num_token_blocks(rows.num_rows, rows.num_groups);
  if (!rows.by_block) return launch_groups<kTokensOf>(rows, blocks * kTokenBlock, stream);
  if (blocks == 0) return;
  const dim3 parts(static_cast<unsigned>(divide_up(rows.num_columns, kColumns)),
                   static_cast<unsigned>(blocks));
  quantize_blocks_kernel<kTokensOf><<<parts, kThreads, 0, stream>>>(rows, blocks * kTokenBlock);
  check(cudaGetLastError());
}

}  // namespace

void launch_quantize_tokens(const TokenRows& rows, cudaStream_t stream) {
  switch (rows.dtype) {
    case DType::kE4M3:
      return launch_of<Tokens::kE4m3>(rows, stream);
    case DType::kE5M2:
      return launch_of<Tokens::kE5m2>(rows, stream);
    default:
      return launch_of<Tokens::kBf16>(rows, stream);
  }
}

}  // namespace tessera::cuda
