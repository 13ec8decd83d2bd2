#include "ops/cuda/context.h"
#include "ops/expert_scale/expert_scale.h"
#include "ops/expert_scale/expert_scale_kernels.h"

namespace tessera {
namespace {

template <typename Op>
cuda::ExpertChoices describe(const Args<Op>& args) {
  return {.count = args.in(Op::kProbs).num_elements(),
          .num_experts = static_cast<int>(args.in(Op::kScale).num_elements()),
          .probs = args.in(Op::kProbs).template as<float>(),
          .expert_idx = args.in(Op::kExpertIdx).template as<int32_t>(),
          .scale = args.in(Op::kScale).template as<float>()};
}

void expert_scale(const ExpertScale& /*op*/, const Args<ExpertScale>& args) {
  cuda::launch_expert_scale(describe(args), args.out(ExpertScale::kScaled).as<float>(),
                            cuda::stream_of(args));
}

void expert_scale_backward(const ExpertScaleBackward& /*op*/,
                           const Args<ExpertScaleBackward>& args) {
  using Op = ExpertScaleBackward;
  const Tensor& grad_scale = args.out(Op::kGradScale);
  cuda::launch_expert_scale_backward(
      describe(args), args.in(Op::kGrad).as<float>(), args.out(Op::kGradProbs).as<float>(),
      grad_scale ? grad_scale.as<float>() : nullptr, cuda::stream_of(args));
}

}  // namespace

void add_expert_scale_cuda(KernelTable& table) {
  add_kernel<ExpertScale>(table, expert_scale);
  add_kernel<ExpertScaleBackward>(table, expert_scale_backward);
}

}  // namespace tessera
