// What attention's kernels need besides the products: lists of blocks, and the sums delta.
#include <algorithm>

#include "ops/attention/attention_cuda_kernels.h"
#include "ops/attention/attention_sequence_list.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/short_kernel.cuh"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda::attention {
namespace {

constexpr int kListThreads = 1024;
constexpr int kFewThreads = 256;  // for kFewSequences
constexpr int kDeltaThreads = 256;
constexpr int kDeltaBlocks = 6;  // of an SM, despite the list's registers: 48 kB under way

__global__ void __launch_bounds__(kListThreads) list_sequences_kernel(SequenceList sequences) {
  wait_for_earlier();
  let_next_begin_if_short();
  list_sequences(sequences);
}

/// Calls visit(block, item) for the blocks of a rank's queries, those of a sequence's run by the
/// lanes of a warp.
template <typename Visit>
__device__ void for_each_ring_block(const RingQueries& queries, const int* cu_seqlens,
                                    int num_sequences, int block, const Visit& visit) {
  const int lane = threadIdx.x % kWarp;
  const int num_tokens = queries.num_rows * queries.row_length;
  for (int run = 0; run < queries.num_runs; ++run) {
    for (int s = threadIdx.x / kWarp; s < num_sequences; s += kListThreads / kWarp) {
      const Sequence sequence = sequence_at(cu_seqlens, s, num_tokens);
      const int run_begin = queries.run_begin(run) - sequence.begin;  // a position
      const int begin = max(run_begin, 0);
      const int end = min(run_begin + queries.chunk, sequence.length);
      if (begin >= end) continue;
      for (int b = begin / block + lane; b <= (end - 1) / block; b += kWarp)
        visit(b, Item{run * queries.chunk - run_begin, sequence.begin, end, b * block,
                      (end - 1) / block - b, begin});
    }
  }
}

__global__ void __launch_bounds__(kListThreads)
    list_ring_kernel(WorkList list, RingQueries queries, const int* cu_seqlens, int num_sequences,
                     int block, int num_lengths) {
  wait_for_earlier();
  let_next_begin_if_short();
  for (int i = threadIdx.x; i < num_lengths; i += kListThreads) list.num_of_length[i] = 0;
  if (threadIdx.x == 0) *list.num_items = 0;
  __syncthreads();
  for_each_ring_block(queries, cu_seqlens, num_sequences, block,
                      [&](int b, const Item&) { atomicAdd(&list.num_of_length[b], 1); });
  __syncthreads();
  if (threadIdx.x < kWarp) sum_from_last(list.num_of_length, num_lengths);
  __syncthreads();
  for_each_ring_block(queries, cu_seqlens, num_sequences, block, [&](int b, const Item& item) {
    const int place = atomicAdd(&list.num_of_length[b], 1);
    if (place >= list.capacity) return;
    list.items[place] = item;
    atomicAdd(list.num_items, 1);
  });
}

__global__ void list_cached_kernel(WorkList list, const int* length, int num_queries, int capacity,
                                   int block) {
  wait_for_earlier();
  let_next_begin_if_short();
  const bool valid = num_queries <= *length && *length <= capacity;
  const int num_blocks = valid ? (num_queries + block - 1) / block : 0;
  if (threadIdx.x == 0) *list.num_items = num_blocks;
  const int before = *length - num_queries;
  for (int b = threadIdx.x; b < num_blocks; b += blockDim.x)
    list.items[num_blocks - 1 - b] = {-before, 0, *length, before + b * block, num_blocks - 1 - b,
                                      0,       0};
}

__global__ void sequence_offsets_kernel(SequenceOffsets params) {
  wait_for_earlier();
  let_next_begin_if_short();
  for (int s = threadIdx.x; s <= params.num_sequences; s += blockDim.x) {
    const int begin = min(max(params.cu_seqlens[s], 0), params.num_tokens);
    if (s < params.num_sequences)
      params.lengths[s] = sequence_at(params.cu_seqlens, s, params.num_tokens).length;
    for (int i = 0; i < SequenceOffsets::kNumSizes; ++i)
      params.offsets[i * (params.num_sequences + 1) + s] = begin * params.row_sizes[i];
  }
}

__global__ void transpose_kernel(const float* from, float* to, int64_t rows, int64_t columns) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at < rows * columns) to[at] = from[at % rows * columns + at / rows];
}

/// kLanes neighbouring lanes take a row, a vector each at a time. The first block makes the list,
/// where there is one to be made.
template <typename T, int kWidth, int kLanes, bool kList>
__global__ void __launch_bounds__(kDeltaThreads, kList ? kDeltaBlocks : 1)
    delta_kernel(DeltaParams params, SequenceList sequences) {
  wait_for_earlier();
  let_next_begin_if_short();
  if (kList && blockIdx.x == 0) {
    list_sequences(sequences);
    return;
  }
  const int64_t block = int64_t{blockIdx.x} - (kList ? 1 : 0);
  const int64_t row = block * (kDeltaThreads / kLanes) + threadIdx.x / kLanes;
  const bool is_row = row < params.num_rows * params.num_heads;
  const int lane = threadIdx.x % kLanes;
  float sum = 0;
  for (int c = lane * kWidth; is_row && c < params.head_size_v; c += kLanes * kWidth) {
    const int64_t at = row * params.head_size_v + c;
    const Floats<kWidth> o = load<kWidth>(static_cast<const T*>(params.o) + at);
    const Floats<kWidth> grad_o = load<kWidth>(static_cast<const T*>(params.grad_o) + at);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += o[i] * grad_o[i];
  }
  sum = sum_lanes<kLanes>(sum);
  if (!is_row || lane != 0) return;
  const int64_t at = row % params.num_heads * params.num_rows + row / params.num_heads;
  params.delta[at] = params.grad_lse == nullptr ? sum : sum - params.grad_lse[at];
}

template <typename T, int kWidth, int kLanes>
void launch_delta_with(const DeltaParams& params, const SequenceList* sequences,
                       cudaStream_t stream) {
  const int64_t num_rows = params.num_rows * params.num_heads;
  const auto blocks = static_cast<unsigned>(divide_up(num_rows, kDeltaThreads / kLanes));
  if (sequences == nullptr) {
    launch_early(delta_kernel<T, kWidth, kLanes, false>, {blocks, kDeltaThreads}, stream, params,
                 SequenceList{});
  } else {
    launch_early(delta_kernel<T, kWidth, kLanes, true>, {blocks + 1, kDeltaThreads}, stream, params,
                 *sequences);
  }
}

void launch_delta_and(const SequenceList* sequences, const DeltaParams& params, DType dtype,
                      cudaStream_t stream) {
  const bool vectors =
      are_whole_vectors(dtype, params.head_size_v) && are_aligned(params.o, params.grad_o);
  with_vectors(dtype, vectors, [&]<typename T, int kWidth>() {
    params.head_size_v <= 16 * kWidth ? launch_delta_with<T, kWidth, 16>(params, sequences, stream)
                                      : launch_delta_with<T, kWidth, 32>(params, sequences, stream);
  });
}

}  // namespace

int64_t num_pair_tiles(int64_t length) {
  return pair_tiles(length);
}

int64_t max_items(int64_t num_tokens, int64_t num_sequences, int block) {
  const int64_t not_empty = std::min(num_sequences, num_tokens);
  return (num_tokens + not_empty * (block - 1)) / block;
}

void launch_list_sequences(const SequenceList& sequences, cudaStream_t stream) {
  const int threads = sequences.num_sequences <= kFewSequences ? kFewThreads : kListThreads;
  launch_early(list_sequences_kernel, {1, static_cast<unsigned>(threads)}, stream, sequences);
}

int64_t max_ring_lengths(int64_t num_tokens, int block) {
  return num_tokens / block + 1;
}

int64_t max_ring_items(const RingQueries& queries, int64_t num_sequences, int block) {
  // A part of a sequence in a run has at most two blocks that it does not fill.
  const int64_t num_tokens = int64_t{queries.num_runs} * queries.chunk;
  const int64_t num_parts = std::min(num_sequences, num_tokens) + queries.num_runs;
  return num_tokens / block + 2 * num_parts;
}

void launch_list_ring(const WorkList& list, const RingQueries& queries, const int* cu_seqlens,
                      int num_sequences, int block, cudaStream_t stream) {
  const int64_t num_tokens = int64_t{queries.num_rows} * queries.row_length;
  launch_early(list_ring_kernel, {1, kListThreads}, stream, list, queries, cu_seqlens,
               num_sequences, block, static_cast<int>(max_ring_lengths(num_tokens, block)));
}

void launch_list_cached(const WorkList& list, const int* length, int num_queries, int capacity,
                        int block, cudaStream_t stream) {
  launch_early(list_cached_kernel, {1, kWarp}, stream, list, length, num_queries, capacity, block);
}

void launch_sequence_offsets(const SequenceOffsets& params, cudaStream_t stream) {
  launch_early(sequence_offsets_kernel, {1, kWarp}, stream, params);
}

void launch_transpose(const float* from, float* to, int64_t rows, int64_t columns,
                      cudaStream_t stream) {
  constexpr int kThreads = 256;
  const int64_t blocks = (rows * columns + kThreads - 1) / kThreads;
  launch_early(transpose_kernel, {static_cast<unsigned>(blocks), kThreads}, stream, from, to, rows,
               columns);
}

void launch_delta(const DeltaParams& params, DType dtype, cudaStream_t stream) {
  launch_delta_and(nullptr, params, dtype, stream);
}

void launch_delta_and_list(const DeltaParams& params, const SequenceList& sequences, DType dtype,
                           cudaStream_t stream) {
  launch_delta_and(&sequences, params, dtype, stream);
}

}  // namespace tessera::cuda::attention
