#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include <map>
#include <vector>

#include "ops/cuda/context.h"
#include "ops/cuda/device_buffer.h"
#include "ops/expert_sizes.h"

namespace tessera::cuda {

/// The experts' matrices of one layer, one after the other, and where they and their tokens begin;
/// all in the GPU's memory.
struct ExpertBlocks {
  int num_experts = 0;
  const int* begin = nullptr;        ///< [E + 1]: of each expert's block, in rows of the weight
  const int64_t* offsets = nullptr;  ///< [E + 1]: of each expert's tokens; not read by the host
  int64_t wide = 0;                  ///< H, columns of the weight
  int64_t largest = 0;               ///< max g_e, columns of the narrow matrices
  int64_t total = 0;                 ///< Σ g_e, rows of the weight
  /// Whether products over an expert's block take whole tiles of it: sizes below the largest are
  /// multiples of kGroupedReduction.
  bool in_tiles = true;
};

/// The tables of block begins that a context's kernels use, and their counter. Got by
/// context.get<ExpertTables>().
class ExpertTables {
 public:
  explicit ExpertTables(const CudaContext& context)
      : stream_(context.stream()), counter_(sizeof(int)) {
    check(cudaMemsetAsync(counter(), 0, counter_.num_bytes(), stream_));
  }
  /// All but `offsets`; the table is copied to the GPU when sizes are seen for the first time.
  ExpertBlocks blocks(const ExpertSizes& sizes, int64_t wide);
  /// One for all products, which run one after the other.
  int* counter() const { return counter_.as<int>(); }

 private:
  cudaStream_t stream_;
  DeviceBuffer counter_;
  std::map<std::vector<int64_t>, DeviceBuffer> tables_;
};

/// Products on the tensor cores take `counter`, an int in the GPU's memory that is zero before and
/// after each: with it a cluster of blocks that gets small tiles takes more of them; null, each
/// takes its turn. Results are the same bits.

/// Where the rows of a product's wide operand come from: row r is row source[r] / top_k of what is
/// given, zeros where that is negative. Null: the rows as they lie.
struct RowSource {
  const int* source = nullptr;  ///< [R], in the GPU's memory
  int top_k = 1;
  int64_t num_tokens = 0;  ///< rows that are given
};

/// y = a · W_eᵀ (kOut: a [R, H], y [R, max g_e]) or a · W_e (kIn: a [R, max g_e], y [R, H]), F32 or
/// BF16 with F32 sums; R bounds offsets[E]. See GroupedMatmul. BF16 whose rows are multiples of 16
/// bytes goes to the tensor cores; so does F16, whose y is F32. With a source (kOut alone) `a` is
/// what rows are gathered from.
struct GroupedRows {
  ExpertBlocks experts;
  DType dtype = DType::kBF16;
  bool by_out = true;
  int64_t num_rows = 0;
  const void* a = nullptr;
  const void* weight = nullptr;
  void* y = nullptr;
  int* counter = nullptr;  ///< see above
  RowSource gather = {};
};
void grouped_rows(const GroupedRows& product, cudaStream_t stream);

/// grad [Σ g_e, H] F32 += (or =) narrow_eᵀ · wide_e, F32, BF16 or F16 with F32 sums. See
/// GroupedMatmulWgrad. With a source `wide` is what rows are gathered from.
struct GroupedWgrad {
  ExpertBlocks experts;
  DType dtype = DType::kBF16;
  int64_t num_rows = 0;
  const void* narrow = nullptr;  ///< [R, max g_e]
  const void* wide = nullptr;    ///< [R, H]
  float* grad = nullptr;
  bool accumulate = true;
  int* counter = nullptr;  ///< see above
  RowSource gather = {};
};
void grouped_wgrad(const GroupedWgrad& product, cudaStream_t stream);

}  // namespace tessera::cuda

namespace tessera {

/// GroupedMatmul and GroupedMatmulWgrad.
void add_grouped_matmul_cuda(KernelTable& table);

}  // namespace tessera
