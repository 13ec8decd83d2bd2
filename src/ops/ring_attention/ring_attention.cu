#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/ring_attention/ring_attention_kernels.h"

namespace tessera::cuda {
namespace {

template <typename W>
struct OrderMap {
  static constexpr int kUnroll = 4;
  static constexpr int kBlocks = 4;
  using Loaded = W;

  const W* from;
  W* to;
  int64_t words;  // of a row
  attention::RingQueries queries;

  __device__ __forceinline__ Loaded load(int64_t row, uint32_t word) const {
    return from[queries.gathered_row(static_cast<int>(row)) * words + word];
  }
  __device__ __forceinline__ void store(int64_t row, uint32_t word, const Loaded& value) const {
    to[row * words + word] = value;
  }
};

template <typename W>
void launch_order(const attention::RingQueries& queries, const void* from, void* to,
                  int64_t row_bytes, cudaStream_t stream) {
  const int64_t words = row_bytes / static_cast<int64_t>(sizeof(W));
  launch_map(OrderMap<W>{static_cast<const W*>(from), static_cast<W*>(to), words, queries},
             RowCount{int64_t{queries.num_rows} * queries.row_length}, words, stream);
}

constexpr int kRoundThreads = 256;

__global__ void __launch_bounds__(kRoundThreads)
    round_kernel(const float* from, BFloat16* to, int64_t count) {
  wait_for_earlier();
  const int64_t at = int64_t{blockIdx.x} * kRoundThreads + threadIdx.x;
  if (at < count) to[at] = __float2bfloat16_rn(from[at]);
}

}  // namespace

void launch_order_tokens(const attention::RingQueries& queries, const void* from, void* to,
                         int64_t row_bytes, cudaStream_t stream) {
  const bool vectors = row_bytes % 16 == 0 && are_aligned(from, to);
  const auto run = vectors ? launch_order<uint4> : launch_order<uint16_t>;
  run(queries, from, to, row_bytes, stream);
}

void launch_round(const float* from, void* to, int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>(divide_up(count, kRoundThreads));
  launch_early(round_kernel, {blocks, kRoundThreads}, stream, from, static_cast<BFloat16*>(to),
               count);
}

}  // namespace tessera::cuda
