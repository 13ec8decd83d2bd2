#pragma once

#include "ops/quantize_tokens/token_shares.cuh"

/// A part is cast and turned: columns of 16 tokens lie one behind the other in what is written.
namespace tessera::cuda {
namespace token_parts {

constexpr int kWords = kTokens / kRows;  // of a column of a part

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

/// Four tokens of two columns, by pairs of columns.
__device__ __forceinline__ void cast_words(const __half2 (&rows)[kRows], uint32_t (&words)[2]) {
  const auto& pairs = reinterpret_cast<const uint32_t(&)[kRows]>(rows);
  uint32_t halves[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    asm("{.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
        "mov.b32 %0, {low, high};}"
        : "=r"(halves[i])
        : "r"(pairs[2 * i]), "r"(pairs[2 * i + 1]));
  words[0] = __byte_perm(halves[0], halves[1], 0x6420);
  words[1] = __byte_perm(halves[0], halves[1], 0x7531);
}

/// Casts a part by shares of its scales, where that is exact; else says so.
template <Tokens kTokensOf>
__device__ __forceinline__ bool turn_shares(const Part<kTokensOf>& part,
                                            const Powers<kTokensOf>& powers, uint32_t* words) {
  const Shares<kTokensOf> shares(part);
  typename Powers<kTokensOf>::Words by;
  if (!__all_sync(~0U, powers.find(part, shares, by))) return false;
#pragma unroll
  for (int word = 0; word < kWidth<kTokensOf> / 4; ++word) {
    __half2 own[kRows][2];
#pragma unroll
    for (int r = 0; r < kRows; ++r) shares.decode(part.rows[r].at[word], r, own[r]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      __half2 rows[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        rows[r] = __hmul2(own[r][i], reinterpret_cast<const __half2&>(by[2 * word + i]));
      uint32_t codes[2];
      cast_words(rows, codes);
      words[(4 * word + 2 * i) * kWords] = codes[0];
      words[(4 * word + 2 * i + 1) * kWords] = codes[1];
    }
  }
  return true;
}

/// Casts a part, of which this thread has `num_rows` tokens.
template <Tokens kTokensOf>
__device__ __forceinline__ void turn_values(const Part<kTokensOf>& part,
                                            const Factors<kTokensOf>& factors, int num_rows,
                                            uint32_t* words) {
  // Of a column with an infinity even a zero would become NaN.
  const uint32_t mask = num_rows >= kRows ? ~0U : num_rows <= 0 ? 0U : (1U << 8 * num_rows) - 1;
#pragma unroll
  for (int i = 0; i < kWidth<kTokensOf>; i += 2) {
    const float2 by = *reinterpret_cast<const float2*>(&factors.of[own_column<kTokensOf>() + i]);
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
}

/// Casts a part, of which this thread has `num_rows` tokens, and writes it.
template <Tokens kTokensOf>
__device__ __forceinline__ void turn(const Part<kTokensOf>& part, const Factors<kTokensOf>& factors,
                                     const Powers<kTokensOf>& powers, int num_rows,
                                     Tile<kTokensOf>& tile, const Target<kTokensOf>& to,
                                     int number) {
  const int thread = static_cast<int>(threadIdx.x);
  const int word = (thread / kAcross) ^ (4 * (thread % kAcross));
  uint32_t* const words =
      reinterpret_cast<uint32_t*>(&tile) + own_column<kTokensOf>() * kWords + word;
  bool is_done = false;
  if constexpr (kIsCoded<kTokensOf>) is_done = turn_shares(part, powers, words);
  if (!is_done) turn_values(part, factors, num_rows, words);
  __syncthreads();
  to.store(number, tile);
}

}  // namespace token_parts
}  // namespace tessera::cuda
