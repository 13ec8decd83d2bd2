#include "ops/cuda/context.h"
#include "ops/grad_norm/grad_norm.h"
#include "ops/grad_norm/grad_norm_kernels.h"

namespace tessera {
namespace {

static_assert(SumOfSquares::kChunk == cuda::kSquaresChunk);

void sum_of_squares(const SumOfSquares& /*op*/, const KernelArgs& args) {
  std::vector<cuda::SquaresSlice> slices;
  for (const Tensor& x : args.inputs) slices.push_back({x.as<float>(), x.num_elements()});
  cuda::launch_sums_of_squares(slices, reinterpret_cast<double*>(args.workspace.data()),
                               args.outputs.front().as<double>(), cuda::stream_of(args));
}

int64_t workspace_bytes(const SumOfSquares& /*op*/, std::span<const ValueType> inputs) {
  return SumOfSquares::workspace_bytes(inputs);
}

}  // namespace

void add_grad_norm_cuda(KernelTable& table) {
  add_kernel<SumOfSquares>(table, sum_of_squares, {.workspace = workspace_bytes});
}

}  // namespace tessera
