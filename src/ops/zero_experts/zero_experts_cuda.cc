#include "ops/cuda/context.h"
#include "ops/zero_experts/zero_experts.h"
#include "ops/zero_experts/zero_experts_kernels.h"

namespace tessera {
namespace {

template <typename Op>
cuda::ZeroExpertRows describe(const Op& op, const Args<Op>& args) {
  const Tensor& x = args.in(Op::kX);
  const Tensor& expert_idx = args.in(Op::kExpertIdx);
  return {.dtype = x.dtype,
          .tokens = x.shape[0],
          .width = x.shape[1],
          .top_k = static_cast<int>(expert_idx.shape[1]),
          .num_experts = static_cast<int>(op.spec().num_experts),
          .x = x.data,
          .probs = args.in(Op::kProbs).template as<float>(),
          .expert_idx = expert_idx.as<int32_t>()};
}

void zero_experts(const ZeroExperts& op, const Args<ZeroExperts>& args) {
  cuda::launch_zero_experts(describe(op, args), args.out(ZeroExperts::kY).data,
                            args.out(ZeroExperts::kRoutedIdx).as<int32_t>(), cuda::stream_of(args));
}

void zero_experts_backward(const ZeroExpertsBackward& op, const Args<ZeroExpertsBackward>& args) {
  using Op = ZeroExpertsBackward;
  cuda::launch_zero_experts_backward(describe(op, args), args.in(Op::kGrad).data,
                                     args.out(Op::kGradX).data,
                                     args.out(Op::kGradProbs).as<float>(), cuda::stream_of(args));
}

}  // namespace

void add_zero_experts_cuda(KernelTable& table) {
  add_kernel<ZeroExperts>(table, zero_experts);
  add_kernel<ZeroExpertsBackward>(table, zero_experts_backward);
}

}  // namespace tessera
