#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"
#include "ops/cuda/divider.h"
#include "ops/grouped_matmul/grouped_tile_model.h"
#include "ops/grouped_matmul/grouped_wgrad_model.h"

namespace tessera::cuda {

/// What the grouped kernels can do, for their callers to check.
constexpr int kGroupedFeatures = 128;  ///< of one block's tile
constexpr int kGroupedBoxRows = 64;    ///< rows that one copy of tokens brings
constexpr int kGroupedStoreRows = 32;  ///< rows of y that one store writes

struct ExpertBlocks;

struct GroupedRowsParams {
  CUtensorMap weight;
  CUtensorMap a;
  CUtensorMap y_map;
  void* y;
  const int* block_begin;
  const int64_t* offsets;
  int num_experts;
  int wide;
  int y_columns;
  int* counter;
  const int* source;  ///< null: rows of `a` as they lie; else row r is a's row source[r] / top_k,
                      ///< zeros where negative
  Divider top_k;
  const void* tokens;  ///< `a` itself when source is set (the map `a` is then unused)
  int64_t num_source;  ///< rows that `source` has room for
};
/// Sets what a product takes of the experts, their weights' columns among it.
void set_experts(GroupedRowsParams& params, const ExpertBlocks& experts, int* counter);
void launch_grouped_rows(const GroupedRowsParams& params, bool by_out, cudaStream_t stream);

struct GroupedWgradParams {
  CUtensorMap narrow;
  CUtensorMap wide;
  float* grad;
  const int* block_begin;
  const int64_t* offsets;
  int num_experts;
  int num_columns;
  int64_t num_rows;     ///< that there is room for, of all experts
  int64_t weight_rows;  ///< of all experts' matrices
  bool accumulate;
  int* counter;
  const int* source;  ///< null: rows of `wide` as they lie; else row r is wide's row source[r] /
                      ///< top_k, zeros where negative
  Divider top_k;
  const void* tokens;  ///< `wide` itself when source is set (the map `wide` is then unused)
  int64_t num_source;  ///< rows that `source` has room for
};
/// In the tiles that choose_wgrad_tiles takes.
void launch_grouped_wgrad(const GroupedWgradParams& params, cudaStream_t stream);

/// Products of any type and shape; see GroupedRows and GroupedWgrad (grouped_matmul_cuda.h).
struct PlainRowsParams {
  const void* a;
  const void* weight;
  void* y;
  const int* block_begin;
  const int64_t* offsets;
  int num_experts;
  int64_t num_rows;
  int64_t wide;
  int64_t largest;
  const int* source;  ///< as in GroupedRowsParams
  int top_k;
};
void launch_plain_rows(const PlainRowsParams& params, bool by_out, DType dtype,
                       cudaStream_t stream);

/// The same of BF16, for experts of one size and rows of whole vectors: quickest where the experts'
/// matrices take longer to read than their few rows to multiply.
constexpr int64_t kFewRows = 128;
void launch_few_rows(const PlainRowsParams& params, bool by_out, cudaStream_t stream);

struct PlainWgradParams {
  const void* narrow;
  const void* wide_rows;
  float* grad;
  const int* block_begin;
  const int64_t* offsets;
  int num_experts;
  int64_t wide;
  int64_t largest;
  int64_t total;
  bool accumulate;
  const int* source;  ///< as in GroupedWgradParams
  int top_k;
};
void launch_plain_wgrad(const PlainWgradParams& params, DType dtype, cudaStream_t stream);

/// The same of F16, to F32, without a source. `by_vector`: addresses are multiples of 16 bytes, and
/// wide and all experts' sizes multiples of 8.
void launch_half_rows(const PlainRowsParams& params, bool by_out, bool by_vector,
                      cudaStream_t stream);
void launch_half_wgrad(const PlainWgradParams& params, bool by_vector, cudaStream_t stream);

/// Blocks of two that run at once on the current GPU.
int num_clusters();

}  // namespace tessera::cuda
