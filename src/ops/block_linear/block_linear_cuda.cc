#include "ops/block_linear/block_linear.h"
#include "ops/block_linear/block_products.h"
#include "ops/cuda/context.h"
#include "ops/cuda/matrix_product.h"

namespace tessera {
namespace {

void run_blocks(const KernelArgs& args, const BlockProducts& products) {
  cuda::multiply(args, products.first,
                 {.count = products.count,
                  .a_stride = products.a_stride,
                  .b_stride = products.b_stride,
                  .c_stride = products.c_stride});
}

void block_linear(const BlockLinear& op, const Args<BlockLinear>& args) {
  using Op = BlockLinear;
  const Blocks<Op> blocks(op);
  run_blocks(args, block_products(blocks.of(args.in(Op::kX)), args.in(Op::kWeight),
                                  blocks.of(args.out(Op::kY)), blocks.count()));
}

void block_linear_dgrad(const BlockLinearDgrad& op, const Args<BlockLinearDgrad>& args) {
  using Op = BlockLinearDgrad;
  const Blocks<Op> blocks(op);
  run_blocks(args, block_input_grads(blocks.of(args.in(Op::kGrad)), args.in(Op::kWeight),
                                     blocks.of(args.out(Op::kGradX)), blocks.count()));
}

void block_linear_wgrad(const BlockLinearWgrad& op, const Args<BlockLinearWgrad>& args) {
  using Op = BlockLinearWgrad;
  const Tensor& sum = args.out(Op::kGradWeight);
  if (!sum || sum.num_elements() == 0 || args.in(Op::kX).shape[0] == 0) return;
  const Blocks<Op> blocks(op);
  run_blocks(args, block_weight_grads(blocks.of(args.in(Op::kX)), blocks.of(args.in(Op::kGrad)),
                                      sum, blocks.count(), !args.set_accumulators));
}

}  // namespace

void add_block_linear_cuda(KernelTable& table) {
  add_kernel<BlockLinear>(table, block_linear);
  add_kernel<BlockLinearDgrad>(table, block_linear_dgrad);
  add_kernel<BlockLinearWgrad>(table, block_linear_wgrad, {.sets_accumulators = true});
}

}  // namespace tessera
