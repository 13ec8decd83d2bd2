#include "ops/cuda/activation_rows.h"
#include "ops/cuda/limits.h"
#include "ops/cuda/row_args.h"
#include "ops/expert_activation/expert_activation.h"
#include "ops/scaled_rows.h"

namespace tessera {
namespace {

template <typename Op>
cuda::ActivationRows describe(const ExpertActivation& op, const Args<Op>& args) {
  const Tensor& pre = args.in(Op::kPre);
  const auto* offsets = args.in(Op::kOffsets).template as<int64_t>();
  return {.function = op.function(),
          .dtype = pre.dtype,
          .rows = {.bound = pre.shape[0], .extent = offsets + op.sizes().num_experts()},
          .size = op.sizes().largest(),
          .in_width = op.pre_width(),
          .out_width = op.sizes().largest(),
          .in = pre.data,
          .probs = op.apply_prob() ? args.in(Op::kProbs).template as<float>() : nullptr};
}

/// Where rows of FP8 are to be written.
cuda::Fp8Rows fp8_rows(const Tensor& y) {
  return {.values = static_cast<uint8_t*>(y.data),
          .scales = row_scales_of(y).as<float>(),
          .columns = y.shape[1]};
}

void check_fp8(const Operator& op, const ValueType& values) {
  check_shape(op, values.dtype == DType::kBF16, "on a GPU gives fp8 of bf16, got {}",
              values.to_string());
}

int64_t check_experts(const ExpertActivation& op) {
  if (!op.sizes().are_equal())
    cuda::check_limit(op, op.sizes().num_experts(), cuda::kMaxSizedExperts,
                      "experts of different sizes");
  return 0;
}

cuda::SizedExperts sized_experts(const ExpertActivation& op, const Tensor& offsets) {
  cuda::SizedExperts experts = {};
  const std::vector<int64_t>& sizes = op.sizes().values();
  if (op.sizes().are_equal()) return experts;
  experts.count = static_cast<int>(sizes.size());
  experts.offsets = offsets.as<int64_t>();
  std::ranges::transform(sizes, experts.sizes, [](int64_t size) { return static_cast<int>(size); });
  return experts;
}

void expert_activation(const ExpertActivation& op, const Args<ExpertActivation>& args) {
  using Op = ExpertActivation;
  cuda::launch_activation(
      describe(op, args), sized_experts(op, args.in(Op::kOffsets)), args.out(Op::kAct).data,
      op.gives_fp8() ? fp8_rows(args.out(Op::kActFp8)) : cuda::Fp8Rows{}, cuda::stream_of(args));
}

void expert_activation_backward(const ExpertActivationBackward& backward,
                                const Args<ExpertActivationBackward>& args) {
  using Op = ExpertActivationBackward;
  const ExpertActivation& op = backward.forward();
  const Tensor& pre = args.in(Op::kPre);
  cuda::ActivationRows rows = describe(op, args);
  rows.dtype = args.in(Op::kGrad).dtype;
  const cuda::SizedExperts experts = sized_experts(op, args.in(Op::kOffsets));
  const cuda::ActivationGrads grads = {
      .grad = args.in(Op::kGrad).data,
      .grad_in = args.out(Op::kGradPre).data,
      .grad_probs = op.apply_prob() ? args.out(Op::kGradProbs).as<float>() : nullptr,
      .act = backward.gives_act() ? args.out(Op::kAct).data : nullptr,
      .fp8 = backward.gives_fp8() ? fp8_rows(args.out(Op::kGradPreFp8)) : cuda::Fp8Rows{}};
  if (backward.pre_format() == RowFormat::kValues)
    return cuda::launch_activation_backward(rows, experts, grads, cuda::stream_of(args));
  cuda::launch_scaled_activation_backward(
      rows,
      {.scales = row_scales_of(pre).as<float>(),
       .columns_of_scale = columns_of_scale(pre.scale, pre.shape[1])},
      experts, grads, cuda::stream_of(args));
}

int64_t forward_workspace(const ExpertActivation& op, std::span<const ValueType> inputs) {
  if (op.gives_fp8()) check_fp8(op, inputs[ExpertActivation::kPre]);
  return check_experts(op);
}

int64_t backward_workspace(const ExpertActivationBackward& op, std::span<const ValueType> inputs) {
  if (op.gives_fp8()) check_fp8(op, inputs[ExpertActivationBackward::kGrad]);
  return check_experts(op.forward());
}

}  // namespace

void add_expert_activation_cuda(KernelTable& table) {
  add_kernel<ExpertActivation>(table, expert_activation,
                               {.workspace = forward_workspace, .takes = takes_scaled_rows});
  add_kernel<ExpertActivationBackward>(
      table, expert_activation_backward,
      {.workspace = backward_workspace, .takes = takes_scaled_rows});
}

}  // namespace tessera
