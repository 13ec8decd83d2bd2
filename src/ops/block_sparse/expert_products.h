#pragma once

#include <cuda_runtime.h>

#include "ops/block_sparse/block_sparse_kernels.h"
#include "ops/grouped_matmul/grouped_matmul_cuda.h"

namespace tessera::cuda {

/// The block-diagonal matrix of a layer's experts, g_e columns each.
struct ExpertMatrix {
  const ExpertSizes& sizes;
  ExpertBlocks experts;  ///< of those sizes; `wide` is H, `offsets` are not needed
  DeviceTopology topology;
  const void* values;
};

/// Whether the kernels on tensor cores take products with it: blocks of 64 or 128, H a multiple of
/// 8, at most kMaxExpertWidths sizes, all addresses multiples of 16 bytes. BF16.
bool fits_expert_products(const ExpertMatrix& matrix,
                          std::initializer_list<const void*> dense_matrices);

/// values = dense · W_eᵀ (SDD), or dense = values · W_e (DSD).
struct ExpertRows {
  ExpertMatrix matrix;
  bool gives_values;
  const void* dense;  ///< [R, H]
  int64_t num_rows;   ///< R, or its bound
  const void* weight;
  bool weight_by_rows;  ///< stored [Σ g_e, H], else [H, Σ g_e]
  int* counter;         ///< as in GroupedRows
};
void expert_rows(const ExpertRows& product, cudaStream_t stream);

/// grad F32 (+)= values_eᵀ · dense_e [Σ g_e, H], or dense_eᵀ · values_e [H, Σ g_e].
struct ExpertWgrad {
  ExpertMatrix matrix;
  const void* dense;  ///< [R, H]
  int64_t num_rows;
  float* grad;
  bool grad_by_rows;  ///< [Σ g_e, H]
  bool accumulate;
  int* counter;
};
void expert_wgrad(const ExpertWgrad& product, cudaStream_t stream);

}  // namespace tessera::cuda
