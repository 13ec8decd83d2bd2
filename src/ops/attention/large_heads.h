#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/attention/attention_cuda_kernels.h"

/// Attention of heads that are too large for one warpgroup's registers, in BF16 on Hopper's tensor
/// cores: of packed sequences, or of each token to rows that were chosen for it.
namespace tessera::cuda::large_heads {

inline constexpr int kRows = 64;             ///< rows of a block: of queries, or of keys
inline constexpr int kMostSize = 576;        ///< elements of a head
inline constexpr int kMostSharedSize = 512;  ///< where values are the keys
inline constexpr int kMostSizeV = 512;
/// Thread blocks beyond one for each kRows keys, for keys that many tokens chose, and the sums that
/// these leave to be added up.
inline constexpr int kMoreBlocks = 128;
inline constexpr int kMostSlots = 2 * kMoreBlocks;

/// Some of the tokens that chose any of kRows neighbouring keys.
struct Chunk {
  int tile;   ///< of kRows keys
  int first;  ///< in the tile's list
  int count;
  int slot;  ///< where its sums go; -1: there are no others of the tile
};

/// Who chose what, for the keys' gradients; scratch memory. C = ceil(num_rows / kRows).
struct Choosers {
  uint64_t* masks;  ///< [C, T]: a bit for each of a tile's keys that the token chose
  int* tokens;      ///< [C, T]: those with any, in their order
  int* counts;      ///< [C]
  int2* slots;      ///< [C]: a tile's first slot, and how many it has
  Chunk* chunks;    ///< [C + kMoreBlocks]
  int* num_chunks;  ///< one value
  int num_slots;
};
constexpr int64_t num_key_tiles(int64_t num_rows) {
  return (num_rows + kRows - 1) / kRows;
}
/// Slots that can be needed.
int64_t most_slots(int64_t num_tokens, int64_t num_rows);
/// Among how many thread blocks the query heads of 64 keys are shared, given how many times 64 keys
/// there are, so that the GPU's SMs have work.
int num_parts(int64_t num_items, int group);

struct Params {
  attention::Heads heads;  ///< heads.num_rows are the tokens with queries
  int num_rows;            ///< of keys and values
  int num_sms;
  const void* q;
  const void* k;
  const void* v;  ///< the same as k: values are the keys
  /// I32 [T, top_k]: rows of k and v, behind the last of which a token has -1. Null: tokens see
  /// those before them in their sequences, of which `items` are the blocks of kRows.
  const int32_t* chosen;
  int top_k;
  const int* num_items;
  const attention::Item* items;
  int max_items;
  void* o;
  float* lse;
  const void* grad_o;  ///< this and what follows: backward alone
  const float* delta;
  void* grad_q;
  void* grad_k;
  void* grad_v;
  Choosers choosers;  ///< where rows were chosen
  int num_parts;      ///< else
  /// Scratch memory: what blocks leave of keys that several have, [num_kv_heads, num_slots, kRows,
  /// size] or, where there are parts, [num_parts, num_rows, num_kv_heads, size].
  float* sums;
};

/// Whether these kernels take heads of such sizes; rows must begin at multiples of 16 bytes.
bool fits(int64_t head_size, int64_t head_size_v);
void launch_forward(const Params& params, cudaStream_t stream);
void launch_query_grad(const Params& params, cudaStream_t stream);
/// Each sum has a fixed order, whatever the GPU. Where the values are the keys, grad_k is the sum
/// of both gradients and grad_v zero.
void launch_key_grads(const Params& params, cudaStream_t stream);

/// Ends with an error where a row was chosen that there is not.
void launch_check_choice(const Params& params, cudaStream_t stream);
/// Makes params.choosers but for the sums.
void launch_list_choosers(const Params& params, cudaStream_t stream);
/// Adds up what several blocks left of the same keys to `grad` BF16 [num_rows, Nkv·size].
void launch_add_sums(const Params& params, void* grad, int size, cudaStream_t stream);

}  // namespace tessera::cuda::large_heads
