#include "ops/cuda/context.h"
#include "ops/top_p/top_p.h"
#include "ops/top_p/top_p_kernels.h"

namespace tessera {
namespace {

cuda::TopPTokens describe(const TopPSpec& spec, const Tensor& probs, const Tensor& choices) {
  return {.rule = {.top_k = static_cast<int>(choices.shape[1]),
                   .share = static_cast<float>(spec.share),
                   .normalize = spec.normalize,
                   .scale = static_cast<float>(spec.scaling_factor)},
          .tokens = choices.shape[0],
          .num_experts = static_cast<int>(spec.num_experts),
          .probs = probs.as<float>(),
          .expert_idx = choices.as<int32_t>()};
}

void top_p(const TopP& op, const Args<TopP>& args) {
  using Op = TopP;
  cuda::launch_top_p(describe(op.spec(), args.in(Op::kProbs), args.in(Op::kExpertIdx)),
                     args.out(Op::kKeptProbs).as<float>(), args.out(Op::kKeptIdx).as<int32_t>(),
                     args.out(Op::kCounts).as<float>(), cuda::stream_of(args));
}

void top_p_backward(const TopPBackward& op, const Args<TopPBackward>& args) {
  using Op = TopPBackward;
  cuda::launch_top_p_backward(describe(op.spec(), args.in(Op::kProbs), args.in(Op::kKeptIdx)),
                              args.in(Op::kGrad).as<float>(), args.out(Op::kGradProbs).as<float>(),
                              cuda::stream_of(args));
}

}  // namespace

void add_top_p_cuda(KernelTable& table) {
  add_kernel<TopP>(table, top_p);
  add_kernel<TopPBackward>(table, top_p_backward);
}

}  // namespace tessera
