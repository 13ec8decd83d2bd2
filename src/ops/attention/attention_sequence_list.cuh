#pragma once

// How a thread block lists the blocks of all sequences (SequenceList), those that see most keys
// first. The order of equal ones may differ from run to run, and with it only the order of the
// work.
#include "ops/attention/attention_cuda_kernels.h"

namespace tessera::cuda::attention {

constexpr int kWarp = 32;
static_assert(kFewSequences <= kWarp);

struct Sequence {
  int begin;
  int length;

  __device__ int num_blocks(int block) const { return (length + block - 1) / block; }
};

/// Makes no sequence reach beyond the tokens, whatever the lengths are.
__device__ inline Sequence sequence_at(const int* cu_seqlens, int s, int num_tokens) {
  const int begin = min(max(cu_seqlens[s], 0), num_tokens);
  const int end = min(max(cu_seqlens[s + 1], begin), num_tokens);
  return {begin, end - begin};
}
__device__ inline Sequence sequence_at(const SequenceList& sequences, int s) {
  return sequence_at(sequences.cu_seqlens, s, sequences.num_tokens);
}

__host__ __device__ inline int64_t pair_tiles(int64_t length) {
  const int64_t tiles = (length + 63) / 64;
  const int64_t blocks = (tiles + 1) / 2;
  return 2 * (blocks * tiles - blocks * (blocks - 1));
}

/// The sum of the warp's values up to this lane's.
template <typename T>
__device__ T sum_up_to_lane(T sum) {
  for (int step = 1; step < kWarp; step *= 2) {
    const T other = __shfl_up_sync(~0U, sum, step);
    if (static_cast<int>(threadIdx.x) % kWarp >= step) sum += other;
  }
  return sum;
}

/// Turns counts into the begins of their places, the last count's first. One warp.
__device__ inline void sum_from_last(int* counts, int num_counts) {
  const int lane = threadIdx.x % kWarp;
  int before = 0;
  for (int last = num_counts - 1; last >= 0; last -= kWarp) {
    const int at = last - lane;
    const int own = at >= 0 ? counts[at] : 0;
    const int sum = sum_up_to_lane(own);
    if (at >= 0) counts[at] = before + sum - own;
    before += __shfl_sync(~0U, sum, kWarp - 1);
  }
}

/// By one warp: where each sequence's tiles of pairs begin, and whether all fit.
__device__ inline void place_pairs(const SequenceList& sequences) {
  const WorkList& list = sequences.list;
  const int lane = threadIdx.x % kWarp;
  int64_t before = 0;
  for (int first = 0; first < sequences.num_sequences; first += kWarp) {
    const int s = first + lane;
    const int64_t own =
        s < sequences.num_sequences ? pair_tiles(sequence_at(sequences, s).length) : 0;
    const int64_t sum = sum_up_to_lane(own);
    if (s < sequences.num_sequences) list.first_pairs[s] = before + sum - own;
    before += __shfl_sync(~0U, sum, kWarp - 1);
  }
  if (lane == 0) *list.pairs_fit = before <= list.pair_capacity ? 1 : 0;
}

__device__ inline Item block_of(const SequenceList& sequences, const Sequence& sequence, int b,
                                int64_t first_pairs) {
  return {.query_row = sequence.begin,
          .key_row = sequence.begin,
          .length = sequence.length,
          .first = b * sequences.block,
          .num_after = sequence.num_blocks(sequences.block) - 1 - b,
          .begin = 0,
          .first_pairs = first_pairs};
}

/// Calls visit(s, sequence, b) for all sequences' blocks, those of a sequence by the lanes of a
/// warp.
template <typename Visit>
__device__ void for_each_block(const SequenceList& sequences, const Visit& visit) {
  const int lane = threadIdx.x % kWarp;
  for (int s = threadIdx.x / kWarp; s < sequences.num_sequences; s += blockDim.x / kWarp) {
    const Sequence sequence = sequence_at(sequences, s);
    const int num_blocks = min(sequence.num_blocks(sequences.block), sequences.list.capacity);
    for (int b = lane; b < num_blocks; b += kWarp) visit(s, sequence, b);
  }
}

/// Counting sort by the blocks' numbers in their sequences.
__device__ inline void list_many_sequences(const SequenceList& sequences) {
  const WorkList& list = sequences.list;
  for (int i = threadIdx.x; i <= list.capacity; i += blockDim.x) list.num_of_length[i] = 0;
  if (threadIdx.x == 0) *list.num_items = 0;
  __syncthreads();
  for_each_block(sequences,
                 [&](int, const Sequence&, int b) { atomicAdd(&list.num_of_length[b], 1); });
  __syncthreads();
  const int warp = threadIdx.x / kWarp;
  if (warp == 0) sum_from_last(list.num_of_length, list.capacity + 1);
  if (warp == 1 && list.first_pairs != nullptr) place_pairs(sequences);
  __syncthreads();
  for_each_block(sequences, [&](int s, const Sequence& sequence, int b) {
    const int place = atomicAdd(&list.num_of_length[b], 1);
    if (place >= list.capacity) return;
    list.items[place] =
        block_of(sequences, sequence, b, list.first_pairs == nullptr ? 0 : list.first_pairs[s]);
    atomicAdd(list.num_items, 1);
  });
}

/// At most kFewSequences sequences, one a lane of every warp.
struct FewSequences {
  const SequenceList& sequences;
  Sequence own;
  int num_blocks;
  int64_t first_pairs;  ///< where pairs are kept
  int64_t num_pairs;    ///< of all sequences

  __device__ explicit FewSequences(const SequenceList& from) : sequences(from) {
    const int lane = threadIdx.x % kWarp;
    own = lane < from.num_sequences ? sequence_at(from, lane) : Sequence{0, 0};
    num_blocks = own.num_blocks(from.block);
    first_pairs = 0;
    num_pairs = 0;
    if (from.list.first_pairs == nullptr) return;
    const int64_t own_pairs = pair_tiles(own.length);
    const int64_t sum = sum_up_to_lane(own_pairs);
    first_pairs = sum - own_pairs;
    num_pairs = __shfl_sync(~0U, sum, kWarp - 1);
  }

  /// The place of block b of sequence s: behind all blocks of a higher number, and those of its own
  /// number of earlier sequences. By all lanes, each with a block of its own.
  __device__ int place_of(int s, int b) const {
    int place = 0;
    for (int other = 0; other < sequences.num_sequences; ++other) {
      const int of_other = __shfl_sync(~0U, num_blocks, other);
      place += max(of_other - 1 - b, 0) + (other < s && of_other > b ? 1 : 0);
    }
    return place;
  }

  __device__ void list_blocks(int s, int first) const {
    const Sequence sequence = {__shfl_sync(~0U, own.begin, s), __shfl_sync(~0U, own.length, s)};
    const int64_t pairs = __shfl_sync(~0U, first_pairs, s);
    const int b = first + static_cast<int>(threadIdx.x) % kWarp;
    const int place = place_of(s, b);
    if (b < sequence.num_blocks(sequences.block) && place < sequences.list.capacity)
      sequences.list.items[place] = block_of(sequences, sequence, b, pairs);
  }
};

/// Warps need nothing of one another, so that the list takes one reading and one writing of the
/// GPU's memory.
__device__ inline void list_few_sequences(const SequenceList& sequences) {
  const WorkList& list = sequences.list;
  const FewSequences few(sequences);
  const int warp = threadIdx.x / kWarp;
  const int num_warps = blockDim.x / kWarp;
  for (int s = 0; s < sequences.num_sequences; ++s) {
    const int num_blocks = __shfl_sync(~0U, few.num_blocks, s);
    for (int part = (s + warp) % num_warps; part * kWarp < num_blocks; part += num_warps)
      few.list_blocks(s, part * kWarp);
  }
  const int num_items = __shfl_sync(~0U, sum_up_to_lane(few.num_blocks), kWarp - 1);
  if (threadIdx.x != 0) return;
  *list.num_items = min(num_items, list.capacity);
  if (list.first_pairs != nullptr) *list.pairs_fit = few.num_pairs <= list.pair_capacity ? 1 : 0;
}

/// By all threads of a block of whole warps, at least two.
__device__ inline void list_sequences(const SequenceList& sequences) {
  if (sequences.num_sequences <= kFewSequences) {
    list_few_sequences(sequences);
  } else {
    list_many_sequences(sequences);
  }
}

}  // namespace tessera::cuda::attention
