// The gradient of the experts' matrices, one operand of which lies in the values of a block-sparse
// matrix: DSᵀD, stored by rows, and DDᵀS, stored by columns.
#include "ops/block_sparse/expert_kernels.h"
#include "ops/grouped_matmul/grouped_wgrad.cuh"

namespace tessera::cuda {
namespace {

using namespace wgrad;

template <int kTileColumns, bool kPingPong, SparseOperand kSparse>
void launch(const ExpertWgradParams& params, cudaStream_t stream) {
  params.accumulate
      ? wgrad::launch<Schedule<kTileColumns, kPingPong, true, false, kSparse>>(params, stream)
      : wgrad::launch<Schedule<kTileColumns, kPingPong, false, false, kSparse>>(params, stream);
}

/// The sparse operand lies along the gradient's rows or along its columns.
WgradShape shape_of(const ExpertWgradParams& params, SparseOperand sparse) {
  const int64_t own = params.weight_rows / params.num_experts;
  return {.num_experts = params.num_experts,
          .tokens = params.num_rows / params.num_experts,
          .rows = sparse == SparseOperand::kRows ? own : params.dense_columns,
          .columns = sparse == SparseOperand::kRows ? params.dense_columns : own,
          .accumulate = params.accumulate};
}

template <SparseOperand kSparse>
void launch(const ExpertWgradParams& params, cudaStream_t stream) {
  switch (choose_wgrad_tiles(shape_of(params, kSparse), num_clusters()).columns) {
    case 256:
      return launch<256, false, kSparse>(params, stream);
    case 192:
      return launch<192, true, kSparse>(params, stream);
    default:
      return wgrad::launch<Schedule<128, true, true, false, kSparse>>(params, stream);
  }
}

}  // namespace

void launch_expert_wgrad(const ExpertWgradParams& params, bool grad_by_rows, cudaStream_t stream) {
  grad_by_rows ? launch<SparseOperand::kRows>(params, stream)
               : launch<SparseOperand::kColumns>(params, stream);
}

}  // namespace tessera::cuda
