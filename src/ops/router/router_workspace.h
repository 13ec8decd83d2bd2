#pragma once

#include <algorithm>

#include "ops/router/router.h"
#include "ops/workspace.h"

namespace tessera {

/// Tokens are worked on in blocks of this many, and partial sums are taken by block: their order
/// does not depend on the number of threads.
inline constexpr int64_t kRouterBlock = 64;
/// Rows of BF16 x that have room to be widened at a time, by all threads together.
inline constexpr int64_t kRouterWidenedRows = 1024;
/// Rows that a product with BF16 x takes at a time: its bits depend on it.
inline constexpr int64_t kRouterProductRows = 512;
static_assert(kRouterProductRows <= kRouterWidenedRows);
/// Rows of E floats that a block of tokens has for scratch.
inline constexpr int64_t kRouterScratchRows = 6;
/// Up to this many experts, threads make a router's products block by block (few_experts.h).
inline constexpr int64_t kFewExperts = 32;
static_assert(kFewExperts <= kRouterBlock);

/// Sizes of one router call. A *segment* is the tokens whose balance loss is taken together.
struct RouterSizes {
  int64_t num_tokens = 0;
  int64_t hidden_size = 0;
  int64_t num_experts = 0;
  int64_t num_segments = 1;

  int64_t num_blocks() const { return (num_tokens + kRouterBlock - 1) / kRouterBlock; }
  /// Rows that have room to be widened: whole blocks.
  int64_t widened_rows() const { return std::min(num_blocks() * kRouterBlock, kRouterWidenedRows); }
  bool has_few_experts() const { return num_experts <= kFewExperts; }
  /// Of few experts: blocks of a chunk of tokens, which has a sum of the weight's gradient of its
  /// own. All chunks' sums have room where widened rows would.
  int64_t blocks_of_chunk() const {
    constexpr int64_t kMostChunks = 64;
    const int64_t most = std::min(kMostChunks, kRouterWidenedRows / num_experts);
    return (num_blocks() + most - 1) / most;
  }
};

/// Where the parts of the router's scratch memory start, in bytes.
struct RouterWorkspace {
  int64_t widened = 0;      ///< f32 [widened_rows, H], or sums of chunks f32 [chunks, E, H]
  int64_t scratch = 0;      ///< f32 [blocks, kRouterScratchRows, E]
  int64_t fractions = 0;    ///< f32 [segments, E]
  int64_t partials = 0;     ///< f64 [blocks, 2] partial balance and z losses (forward)
  int64_t grad_logits = 0;  ///< f32 [T, E] (backward)
  int64_t num_bytes = 0;

  static RouterWorkspace of_forward(const RouterSizes& sizes);
  static RouterWorkspace of_backward(const RouterSizes& sizes);
};

}  // namespace tessera
