#pragma once

#include "ops/cuda/fp8_cast.cuh"
#include "ops/quantize_tokens/quantize_tokens_kernels.h"
#include "ops/quantize_tokens/token_blocks.h"

/// Parts of 128 tokens by 128 bytes of columns, as a block of threads reads them.
namespace tessera::cuda {
namespace token_parts {

constexpr int kThreads = 256;
constexpr int kTokens = static_cast<int>(kTokenBlock);
constexpr int kAcross = 8;                             // threads that have a token of a part
constexpr int kRows = kTokens / (kThreads / kAcross);  // tokens that a thread has
static_assert(kRows == 4, "a word of E4M3");

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
  __device__ __forceinline__ bool has_values(int row) const {
    const auto& of = rows[row].at;
    return ((of[0] | of[1] | of[2] | of[3]) & 0x7F7F7F7FU) != 0;
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
  uint32_t scales_apart;  // from one row to the next
  uint32_t num_columns;
  int num_rows;  // of the group, from this thread's first one on; none beyond the last column
  const int32_t* sources;
  Divider top_k;

  __device__ __forceinline__ Source(const TokenRows& rows, const Group& group, int64_t column)
      : first(static_cast<const Element*>(rows.x) + column + own_column<kTokensOf>()),
        num_columns(static_cast<uint32_t>(rows.num_columns)),
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
      const auto of_scale = static_cast<uint32_t>(rows.columns_of_scale);
      const auto own = static_cast<uint32_t>(column) + own_column<kTokensOf>();
      scales_apart = (num_columns + of_scale - 1) / of_scale;
      scales = rows.row_scales + own / of_scale;
      if constexpr (!kGathers) scales += row * scales_apart;
    }
  }

  /// This thread's tokens that the group has in a part, and perhaps in those behind.
  __device__ __forceinline__ int rows_left(int part) const { return num_rows - part * kTokens; }

  /// Zeros behind the group's last token, and where rows are padding.
  __device__ __forceinline__ void load(int part, Part<kTokensOf>& to) const {
    const int left = rows_left(part);
    const auto row = static_cast<uint32_t>(part) * kTokens;
    if (left >= kRows) return load_rows<true>(row, kRows, to);
    load_rows<false>(row, left, to);
  }

 private:
  template <bool kAll>
  __device__ __forceinline__ void load_rows(uint32_t row, int left, Part<kTokensOf>& to) const {
    int places[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) places[r] = kAll || r < left ? place_of(row + r) : -1;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool is_there = (kAll && !kGathers) || places[r] >= 0;
      if constexpr (!kAll || kGathers) clear(to, r);
      if (is_there) load_row(static_cast<uint32_t>(places[r]), r, to);
    }
  }

  /// The scale of a row that is not there is as small as those of zeros are.
  __device__ __forceinline__ static void clear(Part<kTokensOf>& to, int r) {
    to.rows[r] = {};
    if constexpr (kIsCoded<kTokensOf>) to.scales[r] = kSmallestRounded;
  }

  __device__ __forceinline__ void load_row(uint32_t place, int r, Part<kTokensOf>& to) const {
    reinterpret_cast<uint4&>(to.rows[r]) =
        *reinterpret_cast<const uint4*>(first + uint64_t{place} * num_columns);
    if constexpr (kIsCoded<kTokensOf>) to.scales[r] = scales[uint64_t{place} * scales_apart];
  }

  /// The row of x, from `first` on; negative where it is padding.
  __device__ __forceinline__ int place_of(uint32_t row) const {
    if constexpr (!kGathers) return static_cast<int>(row);
    const int source = __ldg(sources + row);
    return source < 0 ? -1 : static_cast<int>(top_k.quotient(static_cast<uint32_t>(source)));
  }
};

}  // namespace token_parts
}  // namespace tessera::cuda
