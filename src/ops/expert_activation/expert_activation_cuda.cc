#include "ops/cuda/activation_rows.h"
#include "ops/cuda/limits.h"
#include "ops/cuda/row_args.h"
#include "ops/expert_activation/expert_activation.h"

namespace tessera {
namespace {

/// `first_input` is the pre-activation's; the probabilities follow it, and the offsets come last.
cuda::ActivationRows describe(const ExpertActivation& op, const KernelArgs& args,
                              size_t first_input) {
  const Tensor& pre = args.in(first_input);
  return {.kind = op.kind(),
          .dtype = pre.dtype,
          .rows = {.bound = pre.shape[0],
                   .extent = args.inputs.back().as<int64_t>() + op.sizes().num_experts()},
          .size = op.sizes().largest(),
          .in_width = op.pre_width(),
          .out_width = op.sizes().largest(),
          .in = pre.data,
          .probs = op.apply_prob() ? args.in(first_input + 1).as<float>() : nullptr};
}

int64_t check_experts(const ExpertActivation& op) {
  if (!op.sizes().are_equal())
    cuda::check_limit(op, op.sizes().num_experts(), cuda::kMaxSizedExperts,
                      "experts of different sizes");
  return 0;
}

cuda::SizedExperts sized_experts(const ExpertActivation& op, const KernelArgs& args) {
  cuda::SizedExperts experts = {};
  const std::vector<int64_t>& sizes = op.sizes().values();
  if (op.sizes().are_equal()) return experts;
  experts.count = static_cast<int>(sizes.size());
  experts.offsets = args.inputs.back().as<int64_t>();
  std::ranges::transform(sizes, experts.sizes, [](int64_t size) { return static_cast<int>(size); });
  return experts;
}

void expert_activation(const Operator& base, const KernelArgs& args) {
  const auto& op = static_cast<const ExpertActivation&>(base);
  cuda::launch_activation(describe(op, args, 0), sized_experts(op, args), args.out(0).data,
                          cuda::stream_of(args));
}

void expert_activation_backward(const Operator& base, const KernelArgs& args) {
  const auto& backward = static_cast<const ExpertActivationBackward&>(base);
  const ExpertActivation& op = backward.forward();
  cuda::launch_activation_backward(
      describe(op, args, 1), sized_experts(op, args),
      {.grad = args.in(0).data,
       .grad_in = args.out(0).data,
       .grad_probs = op.apply_prob() ? args.out(1).as<float>() : nullptr,
       .act = backward.gives_act() ? args.outputs.back().data : nullptr},
      cuda::stream_of(args));
}

int64_t forward_workspace(const Operator& op, std::span<const ValueType> /*inputs*/) {
  return check_experts(static_cast<const ExpertActivation&>(op));
}

int64_t backward_workspace(const Operator& op, std::span<const ValueType> /*inputs*/) {
  return check_experts(static_cast<const ExpertActivationBackward&>(op).forward());
}

}  // namespace

void add_expert_activation_cuda(KernelTable& table) {
  table["expert_activation"] = Kernel(expert_activation, forward_workspace);
  table["expert_activation_backward"] = Kernel(expert_activation_backward, backward_workspace);
}

}  // namespace tessera
