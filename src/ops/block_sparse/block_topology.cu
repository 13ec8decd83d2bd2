#include "ops/block_sparse/block_sparse_kernels.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 1024;  // at least one to an expert

/// How many of the sorted `values` [n + 1] from the second on are up to `value`: the expert that it
/// falls to, those without any passed over.
template <typename T>
__device__ __forceinline__ int find_expert(const T* values, int n, int64_t value) {
  int low = 0;
  int high = n;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (values[middle + 1] <= value) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Every block first adds up where the experts' blocks begin, then writes its part of each array.
__global__ void __launch_bounds__(kThreads) build(const __grid_constant__ BuildTopology p) {
  wait_for_earlier();
  __shared__ int32_t first_rows[kTopologyMaxExperts + 1];
  __shared__ int32_t first_blocks[kTopologyMaxExperts + 1];
  const int expert = threadIdx.x;
  for (int e = expert; e <= p.num_experts; e += kThreads)
    first_rows[e] = static_cast<int32_t>(p.offsets[e] / p.block_size);
  if (expert < p.num_experts) {
    const int64_t rows = p.offsets[expert + 1] - p.offsets[expert];
    if (rows < 0 || rows % p.block_size != 0)
      fail("block_topology: an expert's rows are no multiple of the block size", rows);
  }
  if (expert == 0 && p.offsets[p.num_experts] / p.block_size > p.max_block_rows)
    fail("block_topology: more routed rows than the bound", p.offsets[p.num_experts]);
  __syncthreads();
  if (expert == 0) {
    int32_t before = 0;
    for (int e = 0; e < p.num_experts; ++e) {
      first_blocks[e] = before;
      before += (first_rows[e + 1] - first_rows[e]) * (p.first_cols[e + 1] - p.first_cols[e]);
    }
    first_blocks[p.num_experts] = before;
  }
  __syncthreads();

  const int32_t num_blocks = first_blocks[p.num_experts];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  if (first == 0) *p.num_blocks = num_blocks;
  for (int64_t row = first; row <= p.max_block_rows; row += step) {
    const int e = find_expert(first_rows, p.num_experts, row);
    p.row_offsets[row] = e == p.num_experts
                             ? num_blocks
                             : first_blocks[e] + static_cast<int32_t>(row - first_rows[e]) *
                                                     (p.first_cols[e + 1] - p.first_cols[e]);
  }
  const int32_t num_cols = p.first_cols[p.num_experts];
  for (int64_t col = first; col <= num_cols; col += step) {
    const int e = find_expert(p.first_cols, p.num_experts, col);
    p.col_offsets[col] = e == p.num_experts
                             ? num_blocks
                             : first_blocks[e] + static_cast<int32_t>(col - p.first_cols[e]) *
                                                     (first_rows[e + 1] - first_rows[e]);
  }
  for (int64_t block = first; block < num_blocks; block += step) {
    const int e = find_expert(first_blocks, p.num_experts, block);
    const auto local = static_cast<int32_t>(block - first_blocks[e]);
    const int32_t rows = first_rows[e + 1] - first_rows[e];
    const int32_t cols = p.first_cols[e + 1] - p.first_cols[e];
    p.row_indices[block] = first_rows[e] + local / cols;
    p.col_indices[block] = p.first_cols[e] + local % cols;
    p.transpose_indices[block] = first_blocks[e] + local % rows * cols + local / rows;
  }
}

}  // namespace

void launch_build_topology(const BuildTopology& topology, cudaStream_t stream) {
  const int64_t work = topology.max_blocks > topology.max_block_rows ? topology.max_blocks
                                                                     : topology.max_block_rows + 1;
  const int64_t wanted = (work + kThreads - 1) / kThreads;
  launch_early(build, {static_cast<unsigned>(wanted < 128 ? wanted : 128), kThreads}, stream,
               topology);
}

}  // namespace tessera::cuda
