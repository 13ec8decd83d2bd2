// A block of threads turns parts of 128 tokens by 128 bytes of columns: they wait in registers, as
// they were read, while their scales are found, and lie in shared memory as they are turned, in
// words of four tokens that are swapped so that no bank is met twice. With a scale for every 128
// tokens that is all. Where all tokens of a group share one, the blocks of a cluster have a group's
// tokens of these columns between them and exchange the largest values; the first parts of each
// stay in registers meanwhile, and the rest is read again, mostly from the L2 cache.
#include "ops/cuda/fp8_cast.cuh"
#include "ops/cuda/ptx/barrier.cuh"
#include "ops/quantize_tokens/quantize_tokens_kernels.h"
#include "ops/quantize_tokens/token_blocks.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTokens = static_cast<int>(kTokenBlock);
constexpr int kAcross = 8;                             // threads that have a token of a part
constexpr int kRows = kTokens / (kThreads / kAcross);  // tokens that a thread has
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

/// Elements of x.
enum class Tokens { kBf16, kE4m3, kE5m2 };

template <Tokens kTokensOf>
constexpr bool kIsCoded = kTokensOf != Tokens::kBf16;
template <Tokens kTokensOf>
constexpr int kWidth = kIsCoded<kTokensOf> ? 16 : 8;  // columns that a thread has of a part
/// Blocks of threads that an SM has registers for, where parts are kept.
template <Tokens kTokensOf>
constexpr int kBlocksOfSm = kIsCoded<kTokensOf> ? 2 : 3;
template <Tokens kTokensOf>
constexpr int kColumns = kAcross* kWidth<kTokensOf>;

/// This thread's place in a part: tokens from own_row() on, columns from own_column() on.
__device__ __forceinline__ int own_row() {
  return static_cast<int>(threadIdx.x) / kAcross * kRows;
}
template <Tokens kTokensOf>
__device__ __forceinline__ int own_column() {
  return static_cast<int>(threadIdx.x) % kAcross * kWidth<kTokensOf>;
}

/// What a thread has of a part, as it was read.
template <Tokens kTokensOf>
struct Part {
  Pack<BFloat16, 8> rows[kRows];

  /// Of two neighbours.
  __device__ __forceinline__ float2 values(int row, int column) const {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(rows[row].at[column]));
  }
  __device__ __forceinline__ __nv_bfloat162 magnitudes(int row, int column) const {
    return __habs2(reinterpret_cast<const __nv_bfloat162&>(rows[row].at[column]));
  }
};

template <Tokens kTokensOf>
requires(kIsCoded<kTokensOf>) struct Part<kTokensOf> {
  Pack<uint32_t, 4> rows[kRows];  // of four codes each
  float scales[kRows];

  __device__ __forceinline__ float2 values_of(uint32_t codes, int row, int column) const {
    constexpr auto kType = kTokensOf == Tokens::kE4m3 ? __NV_E4M3 : __NV_E5M2;
    const auto two = static_cast<__nv_fp8x2_storage_t>(codes >> 8 * (column % 4));
    const float2 pair = __half22float2(__nv_cvt_fp8x2_to_halfraw2(two, kType));
    return {__fmul_rn(pair.x, scales[row]), __fmul_rn(pair.y, scales[row])};
  }
  __device__ __forceinline__ float2 values(int row, int column) const {
    return values_of(rows[row].at[column / 4], row, column);
  }
  /// What FP8 stands for is held by BF16 exactly.
  __device__ __forceinline__ __nv_bfloat162 magnitudes(int row, int column) const {
    return __float22bfloat162_rn(values_of(rows[row].at[column / 4] & 0x7F7F7F7FU, row, column));
  }
  /// Keeps the compiler from keeping what it has converted, in four times the registers.
  __device__ __forceinline__ void keep_codes() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      auto& of = rows[r].at;
      asm volatile("" : "+r"(of[0]), "+r"(of[1]), "+r"(of[2]), "+r"(of[3]));
    }
  }
};

/// What a thread reads of a group's parts, which lie one below the other, or are gathered.
template <Tokens kTokensOf, bool kGathers>
struct Source {
  using Element = std::conditional_t<kIsCoded<kTokensOf>, uint8_t, BFloat16>;

  const Element* first;  // of this thread's columns: its first row, or the first token
  const float* scales;
  int scales_apart;  // from one row to the next
  int64_t num_columns;
  int num_rows;  // of the group, from this thread's first one on; none beyond the last column
  const int32_t* sources;
  Divider top_k;

  __device__ __forceinline__ Source(const TokenRows& rows, const Group& group, int64_t column)
      : first(static_cast<const Element*>(rows.x) + column + own_column<kTokensOf>()),
        num_columns(rows.num_columns),
        num_rows(column + own_column<kTokensOf>() < rows.num_columns
                     ? static_cast<int>(group.end_row - group.first_row) - own_row()
                     : 0) {
    const int64_t row = group.first_row + own_row();
    if constexpr (kGathers) {
      sources = rows.source + row;
      top_k = rows.top_k;
    } else {
      first += row * rows.num_columns;
    }
    if constexpr (kIsCoded<kTokensOf>) {
      scales_apart = static_cast<int>(divide_up(rows.num_columns, rows.columns_of_scale));
      scales = rows.row_scales + (column + own_column<kTokensOf>()) / rows.columns_of_scale;
      if constexpr (!kGathers) scales += row * scales_apart;
    }
  }

  /// This thread's tokens that the group has in a part, and perhaps in those behind.
  __device__ __forceinline__ int rows_left(int part) const { return num_rows - part * kTokens; }

  /// Zeros behind the group's last token.
  __device__ __forceinline__ void load(int part, Part<kTokensOf>& to) const {
    const int64_t row = int64_t{part} * kTokens;
    const int left = rows_left(part);
    int64_t places[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) places[r] = r < left ? place_of(row + r) : -1;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      to.rows[r] = {};
      if constexpr (kIsCoded<kTokensOf>) to.scales[r] = 0;
      if (places[r] < 0) continue;
      reinterpret_cast<uint4&>(to.rows[r]) =
          *reinterpret_cast<const uint4*>(first + places[r] * num_columns);
      if constexpr (kIsCoded<kTokensOf>) to.scales[r] = scales[places[r] * scales_apart];
    }
  }

 private:
  /// The row of x, from `first` on; negative where it is padding.
  __device__ __forceinline__ int64_t place_of(int64_t row) const {
    if constexpr (!kGathers) return row;
    const int source = __ldg(sources + row);
    return source < 0 ? -1 : static_cast<int64_t>(top_k.quotient(static_cast<uint32_t>(source)));
  }
};

/// The largest magnitudes of this thread's columns. A NaN is left out.
template <Tokens kTokensOf>
struct Largest {
  __nv_bfloat162 at[kWidth<kTokensOf> / 2] = {};

  __device__ __forceinline__ void add(Part<kTokensOf>& part) {
    if constexpr (kIsCoded<kTokensOf>) part.keep_codes();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kWidth<kTokensOf> / 2; ++i)
        at[i] = __hmax2(at[i], part.magnitudes(r, 2 * i));
    }
    if constexpr (kIsCoded<kTokensOf>) part.keep_codes();
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

/// What columns are multiplied by.
template <Tokens kTokensOf>
using Factors = float[kColumns<kTokensOf>];

/// Of the largest values that threads have; the scales are written to `scales`, where that is not
/// null, of which `num_columns` are left.
template <Tokens kTokensOf>
__device__ __forceinline__ void share_factors(float largest, Factors<kTokensOf>& factors,
                                              float* scales, int64_t num_columns) {
  if (threadIdx.x < kColumns<kTokensOf>) {
    const float scale = scale_for<true>(largest);
    factors[threadIdx.x] = __frcp_rn(scale);
    if (scales != nullptr && threadIdx.x < num_columns) scales[threadIdx.x] = scale;
  }
  __syncthreads();
}

/// Columns of a part, each as 8 chunks of 16 tokens.
template <Tokens kTokensOf>
using Tile = uint4[kColumns<kTokensOf>][kWords / 4];

/// Where a thread writes a group's parts, which lie side by side: 16 tokens of some columns each.
template <Tokens kTokensOf>
struct Target {
  static constexpr int kChunks = kWords / 4;
  static constexpr int kColumnsApart = kThreads / kChunks;

  uint8_t* first;
  int64_t apart;    // from one of these columns to the next
  int num_columns;  // that there are from the first on

  __device__ __forceinline__ Target(const TokenRows& rows, const Group& group, int64_t column,
                                    int64_t y_columns)
      : first(rows.y + (column + threadIdx.x / kChunks) * y_columns + group.first_block * kTokens +
              threadIdx.x % kChunks * 16),
        apart(kColumnsApart * y_columns),
        num_columns(static_cast<int>(rows.num_columns - column) -
                    static_cast<int>(threadIdx.x) / kChunks) {}

  __device__ __forceinline__ void store(int part, const Tile<kTokensOf>& tile) const {
    const int chunk = static_cast<int>(threadIdx.x) % kChunks;
    uint8_t* to = first + int64_t{part} * kTokens;
#pragma unroll
    for (int i = 0; i < kColumns<kTokensOf> / kColumnsApart; ++i, to += apart) {
      const int column = static_cast<int>(threadIdx.x) / kChunks + i * kColumnsApart;
      if (i * kColumnsApart < num_columns)
        *reinterpret_cast<uint4*>(to) = tile[column][chunk ^ (column / kWidth<kTokensOf>)];
    }
  }
};

/// Four tokens of a column.
__device__ __forceinline__ uint32_t cast_word(const Floats<kRows>& values) {
  const uint16_t low = __nv_cvt_float2_to_fp8x2({values[0], values[1]}, __NV_SATFINITE, __NV_E4M3);
  const uint16_t high = __nv_cvt_float2_to_fp8x2({values[2], values[3]}, __NV_SATFINITE, __NV_E4M3);
  uint32_t word;
  asm("mov.b32 %0, {%1, %2};" : "=r"(word) : "h"(low), "h"(high));
  return word;
}

/// Casts a part, of which this thread has `num_rows` tokens, and writes it.
template <Tokens kTokensOf>
__device__ __forceinline__ void turn(const Part<kTokensOf>& part, const Factors<kTokensOf>& factors,
                                     int num_rows, Tile<kTokensOf>& tile,
                                     const Target<kTokensOf>& to, int number) {
  const int thread = static_cast<int>(threadIdx.x);
  const int across = thread % kAcross;
  // Of a column with an infinity even a zero would become NaN.
  const uint32_t mask = num_rows >= kRows ? ~0U : num_rows <= 0 ? 0U : (1U << 8 * num_rows) - 1;
  const int word = (thread / kAcross) ^ (4 * across);
  uint32_t* const words =
      reinterpret_cast<uint32_t*>(&tile) + own_column<kTokensOf>() * kWords + word;
#pragma unroll
  for (int i = 0; i < kWidth<kTokensOf>; i += 2) {
    const float2 by = *reinterpret_cast<const float2*>(&factors[own_column<kTokensOf>() + i]);
    Floats<kRows> first;
    Floats<kRows> second;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float2 two = part.values(r, i);
      first[r] = __fmul_rn(two.x, by.x);
      second[r] = __fmul_rn(two.y, by.y);
    }
    words[i * kWords] = cast_word(first) & mask;
    words[(i + 1) * kWords] = cast_word(second) & mask;
  }
  __syncthreads();
  to.store(number, tile);
}

/// A scale for 128 tokens: a part a block of threads.
template <Tokens kTokensOf, bool kGathers>
__global__ void __launch_bounds__(kThreads)
    quantize_blocks_kernel(const TokenRows rows, int64_t y_columns) {
  __shared__ Tile<kTokensOf> tile;
  __shared__ alignas(16) Factors<kTokensOf> factors;
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
  turn(part, factors, source.rows_left(number), tile,
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
  __shared__ alignas(16) Factors<kTokensOf> factors;
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
  // Two tiles, so that threads wait for each other but once a part.
  int turns = 0;
  const auto turn_next = [&](int number, const Part<kTokensOf>& part) {
    turn(part, factors, source.rows_left(number), tiles[turns++ % 2], target, number);
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

/// Blocks of a cluster that keep a group of average size in their registers, and a quarter more.
int choose_cluster(const TokenRows& rows) {
  const int64_t blocks = divide_up(rows.num_rows, int64_t{rows.num_groups} * kTokens);
  int cluster = 1;
  while (cluster < kMaxCluster && 4 * cluster * kKept < 5 * blocks) cluster *= 2;
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
