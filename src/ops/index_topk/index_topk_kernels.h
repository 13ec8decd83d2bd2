#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"
#include "ops/paged_attention/kept_rows_args.h"

namespace tessera::cuda {

/// Blocks that choose side by side, each with scratch memory for one token's scores.
constexpr int64_t kMostIndexBlocks = 264;
/// Heads that a thread sums at once: their number is rounded up to a multiple.
constexpr int kIndexHeads = 8;

/// See IndexTopk. Packed sequences have `cu_seqlens` alone, a cache `lengths` alone, pages all;
/// compressed tokens `entries` and `rate`.
struct IndexQueries {
  DType dtype;
  int64_t num_tokens;
  int num_heads;
  int head_size;
  int top_k;
  int64_t num_rows;  ///< of keys
  int64_t longest;   ///< keys of a sequence at most
  const void* q;
  const void* weights;
  const void* keys;
  const int32_t* cu_seqlens;
  int num_sequences;
  const int32_t* lengths;
  const int32_t* page_table;
  int pages_per_sequence;
  KeptTokensArgs entries;
  int rate;          ///< 0: keys are not entries
  uint32_t* scores;  ///< [kMostIndexBlocks, longest], or fewer blocks where tokens are fewer
  int32_t* chosen;
};

/// Shared memory of a block.
constexpr int64_t index_shared_bytes(int64_t num_heads, int64_t head_size) {
  const int64_t heads = (num_heads + kIndexHeads - 1) / kIndexHeads * kIndexHeads;
  return heads * (head_size + 1) * static_cast<int64_t>(sizeof(float));
}
/// What a block may have at most, beside a little of its own.
constexpr int64_t kMostIndexSharedBytes = 200 * 1024;

void launch_index_topk(const IndexQueries& call, cudaStream_t stream);

}  // namespace tessera::cuda
