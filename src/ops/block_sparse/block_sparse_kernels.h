#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/activation_kind.h"

/// Block-sparse matrices on the GPU; see topology.h for how they are stored.
namespace tessera::cuda {

constexpr int kTopologyMaxExperts = 1024;

enum class SparseType { kF32, kBf16 };

/// The topology of a layer's experts, from where each one's rows start.
struct BuildTopology {
  int num_experts;
  int block_size;
  int64_t max_block_rows;
  int64_t max_blocks;
  const int64_t* offsets;  ///< [E + 1] in the GPU's memory
  int32_t* row_offsets;
  int32_t* col_indices;
  int32_t* row_indices;
  int32_t* col_offsets;
  int32_t* transpose_indices;
  int64_t* num_blocks;
  int32_t first_cols[kTopologyMaxExperts + 1];  ///< of each expert's block-columns
};
void launch_build_topology(const BuildTopology& build, cudaStream_t stream);

/// Arrays of a topology in the GPU's memory, at their bounds. Rows past the last are empty.
struct DeviceTopology {
  int block_size;
  int64_t max_block_rows;
  int64_t num_block_cols;
  int64_t max_blocks;
  const int32_t* row_offsets;
  const int32_t* col_indices;
  const int32_t* row_indices;
  const int32_t* col_offsets;
  const int32_t* transpose_indices;
};

/// Columns of a stored matrix: a ragged last dim has its actual extent, in the GPU's memory, for
/// rows lie without gaps.
struct StoredColumns {
  int64_t bound;
  const int64_t* extent;  ///< null: as many as the bound
};

/// A dense operand as it is stored; `transposed` says how it enters the product.
struct DenseOperand {
  const void* data;
  StoredColumns columns;
  bool transposed;
};

/// out = left · right at the topology's blocks.
struct SparseOutput {
  DeviceTopology topology;
  SparseType type;
  int64_t inner;
  DenseOperand left;
  DenseOperand right;
  void* values;
};
void launch_sparse_output(const SparseOutput& product, cudaStream_t stream);

/// The dense output of a sparse matrix and a dense one, *along* being the sparse matrix's dim that
/// the output has and *outer* the dense one's:
///   out(along, outer) (+)= Σ_cross sparse(along, cross) · dense(cross, outer).
struct DenseOutput {
  DeviceTopology topology;
  SparseType type;
  bool by_rows;  ///< along the sparse matrix's rows, else along its columns
  int64_t outer;
  const void* values;
  const void* dense;
  StoredColumns dense_columns;
  bool cross_contiguous;  ///< dense is stored [outer, cross], else [cross, outer]
  void* out;              ///< of the operands' type; null: `sum` is added to
  float* sum;
  bool outer_contiguous;  ///< out is stored [along, outer], else [outer, along]
  StoredColumns out_columns;
  const int64_t* rows;  ///< the output's rows, by_rows alone; null: as many as the topology has
};
void launch_dense_output(const DenseOutput& product, cudaStream_t stream);

/// See BlockSparseActivation. Rows beyond `extent` (null: none) are left alone.
struct SparseActivation {
  ActivationFunction activation;
  SparseType type;
  int block_size;
  int64_t num_rows;
  const int64_t* extent;
  const int32_t* row_offsets;
  const void* pre;
  const float* probs_R;
  const void* grad;  ///< backward alone, as those that follow
  void* out;         ///< forward alone
  void* grad_pre;
  float* grad_probs_R;
};
void launch_sparse_activation(const SparseActivation& activation, cudaStream_t stream);
void launch_sparse_activation_backward(const SparseActivation& activation, cudaStream_t stream);

}  // namespace tessera::cuda
