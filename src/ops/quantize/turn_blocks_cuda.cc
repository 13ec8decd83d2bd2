#include "core/format.h"
#include "ops/cuda/context.h"
#include "ops/quantize/quantize_kernels.h"
#include "ops/quantize/turn_blocks.h"

namespace tessera {
namespace {

void turn_blocks(const TurnBlocks& op, const Args<TurnBlocks>& args) {
  const Tensor& x = args.in(TurnBlocks::kX);
  const Tensor& y = args.out(TurnBlocks::kY);
  if (x.num_elements() == 0) return;
  cuda::launch_turn_blocks({.x = static_cast<const uint8_t*>(x.data),
                            .scales = scales_of(x).as<float>(),
                            .y = static_cast<uint8_t*>(y.data),
                            .turned_scales = scales_of(y).as<float>(),
                            .num_matrices = x.shape[0] / op.matrix_rows(),
                            .num_rows = op.matrix_rows(),
                            .num_columns = x.shape[1]},
                           cuda::stream_of(args));
}

}  // namespace

void add_turn_blocks_cuda(KernelTable& table) {
  add_kernel<TurnBlocks>(table, turn_blocks, {.takes = takes_block_weights});
}

}  // namespace tessera
