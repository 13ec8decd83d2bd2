#include "ops/block_linear/block_linear.h"
#include "ops/block_linear/block_products.h"
#include "ops/gemm/row_products.h"

namespace tessera {
namespace {

void run_blocks(GemmFunction multiply, const BlockProducts& products) {
  for (int64_t block = 0; block < products.count; ++block) multiply(products.of_block(block));
}

template <GemmFunction kMultiply>
void block_linear(const BlockLinear& op, const Args<BlockLinear>& args) {
  using Op = BlockLinear;
  const Blocks<Op> blocks(op);
  run_blocks(kMultiply, block_products(blocks.of(args.in(Op::kX)), args.in(Op::kWeight),
                                       blocks.of(args.out(Op::kY)), blocks.count()));
}

void block_linear_dgrad(const BlockLinearDgrad& op, const Args<BlockLinearDgrad>& args) {
  using Op = BlockLinearDgrad;
  const Blocks<Op> blocks(op);
  run_blocks(gemm, block_input_grads(blocks.of(args.in(Op::kGrad)), args.in(Op::kWeight),
                                     blocks.of(args.out(Op::kGradX)), blocks.count()));
}

void block_linear_wgrad(const BlockLinearWgrad& op, const Args<BlockLinearWgrad>& args) {
  using Op = BlockLinearWgrad;
  const Tensor& sum = args.out(Op::kGradWeight);
  if (!sum) return;
  const Blocks<Op> blocks(op);
  run_blocks(gemm, block_weight_grads(blocks.of(args.in(Op::kX)), blocks.of(args.in(Op::kGrad)),
                                      sum, blocks.count(), !args.set_accumulators));
}

}  // namespace

void add_block_linear_cpu(KernelTable& table) {
  add_kernel<BlockLinear>(table, block_linear<gemm>);
  add_kernel<BlockLinearDgrad>(table, block_linear_dgrad);
  add_kernel<BlockLinearWgrad>(table, block_linear_wgrad, {.sets_accumulators = true});
}

void add_block_linear_of_rows_cpu(KernelTable& table) {
  add_kernel<BlockLinear>(table, block_linear<gemm_of_rows>);
}

}  // namespace tessera
