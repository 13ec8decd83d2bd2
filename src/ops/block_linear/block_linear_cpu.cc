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
  run_blocks(kMultiply, block_products(args.in(BlockLinear::kX), args.in(BlockLinear::kWeight),
                                       args.out(BlockLinear::kY), op.num_blocks()));
}

void block_linear_dgrad(const BlockLinearDgrad& op, const Args<BlockLinearDgrad>& args) {
  using Op = BlockLinearDgrad;
  run_blocks(gemm, block_input_grads(args.in(Op::kGrad), args.in(Op::kWeight), args.out(Op::kGradX),
                                     op.num_blocks()));
}

void block_linear_wgrad(const BlockLinearWgrad& op, const Args<BlockLinearWgrad>& args) {
  using Op = BlockLinearWgrad;
  const Tensor& sum = args.out(Op::kGradWeight);
  if (!sum) return;
  run_blocks(gemm, block_weight_grads(args.in(Op::kX), args.in(Op::kGrad), sum, op.num_blocks(),
                                      !args.set_accumulators));
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
