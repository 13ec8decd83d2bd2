#pragma once

#include "ops/cuda/fail.cuh"
#include "ops/cuda/parts.cuh"
#include "ops/paged_attention/kept_rows_args.h"
#include "ops/paged_attention/pages.h"

namespace tessera::cuda {

/// KeptTokens (kept_tokens.h) on a GPU: a token in hand, and where what is kept of its sequence
/// lies.
struct KeptToken {
  int sequence;  ///< -1: of none
  int position;
  int64_t first_in_hand;

  static __device__ KeptToken find(const KeptTokensArgs& args, int64_t token) {
    const int position = args.positions[token];
    if (args.packed) {
      if (position < 0 || position > token) fail("the position of a token", position);
      return {0, position, token - position};
    }
    if (position < 0) fail("the position of a token", position);
    if (args.cu_seqlens == nullptr) return {0, position, 0};
    if (token >= args.cu_seqlens[args.num_sequences]) return {-1, position, 0};
    const int sequence = find_part(args.cu_seqlens, args.num_sequences, static_cast<int>(token));
    if (position >= args.pages_per_sequence * static_cast<int>(kPageTokens))
      fail("the position of a token in pages", position);
    return {sequence, position, args.cu_seqlens[sequence]};
  }

  __device__ int64_t row(const KeptTokensArgs& args, int64_t token, int position_of_row) const {
    if (args.packed) return token - position + position_of_row;
    if (args.cu_seqlens == nullptr) return position_of_row;
    const int64_t page = args.page_table[static_cast<int64_t>(sequence) * args.pages_per_sequence +
                                         position_of_row / static_cast<int>(kPageTokens)];
    return page < 0 ? -1 : page * kPageTokens + position_of_row % kPageTokens;
  }
  __device__ int64_t entry_row(const KeptTokensArgs& args, int64_t token, int entry,
                               int rate) const {
    return args.packed ? (token - position) / rate + entry : row(args, token, entry);
  }
};

}  // namespace tessera::cuda
