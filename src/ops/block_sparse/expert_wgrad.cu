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

template <SparseOperand kSparse>
void launch(const ExpertWgradParams& params, cudaStream_t stream) {
  switch (choose_tiles(params)) {
    case WgradTiles::kCooperative:
      return launch<kCooperativeColumns, false, kSparse>(params, stream);
    case WgradTiles::kPingPong:
      return launch<kPingPongColumns, true, kSparse>(params, stream);
    case WgradTiles::kAddsHere:
      return wgrad::launch<Schedule<kPingPongColumnsToAddHere, true, true, false, kSparse>>(params,
                                                                                            stream);
  }
}

}  // namespace

void launch_expert_wgrad(const ExpertWgradParams& params, bool grad_by_rows, cudaStream_t stream) {
  grad_by_rows ? launch<SparseOperand::kRows>(params, stream)
               : launch<SparseOperand::kColumns>(params, stream);
}

}  // namespace tessera::cuda
