#include "ops/cuda/context.h"
#include "ops/grad_norm/grad_norm.h"
#include "ops/grad_norm/grad_norm_kernels.h"

namespace tessera {
namespace {

static_assert(SumOfSquares::kChunk == cuda::kSquaresChunk);

void sum_of_squares(const SumOfSquares& /*op*/, const KernelArgs& args) {
  std::vector<cuda::SquaresSlice> slices;
  for (const Tensor& x : args.inputs) slices.push_back({x.data, x.num_elements(), x.dtype});
  cuda::launch_sums_of_squares(slices, reinterpret_cast<double*>(args.workspace.data()),
                               args.outputs.front().as<double>(), cuda::stream_of(args));
}

int64_t workspace_bytes(const SumOfSquares& /*op*/, std::span<const ValueType> inputs) {
  return SumOfSquares::workspace_bytes(inputs);
}

void grad_clip(const GradClip& /*op*/, const KernelArgs& args) {
  std::vector<const float*> losses;
  for (const Tensor& loss : args.inputs.subspan(GradClip::kFirstLoss))
    losses.push_back(loss.as<float>());
  const Tensor& sums = args.in(GradClip::kSums);
  cuda::launch_grad_clip({.sums = sums.as<double>(),
                          .num_sums = sums.num_elements(),
                          .limits = args.in(GradClip::kLimits).as<double>(),
                          .norm = args.out(GradClip::kNorm).as<double>(),
                          .grad_scale = args.out(GradClip::kGradScale).as<float>()},
                         losses, cuda::stream_of(args));
}

}  // namespace

void add_grad_norm_cuda(KernelTable& table) {
  add_kernel<GradClip>(table, grad_clip);
  add_kernel<SumOfSquares>(table, sum_of_squares, {.workspace = workspace_bytes});
}

}  // namespace tessera
