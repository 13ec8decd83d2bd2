#include "ops/cuda/check.h"
#include "ops/cuda/context.h"
#include "ops/cuda/limits.h"
#include "ops/expert_bias/expert_bias.h"
#include "ops/expert_bias/expert_bias_kernels.h"

namespace tessera {
namespace {

int64_t check_experts(const ExpertBias& op) {
  if (!op.sizes().are_equal())
    cuda::check_limit(op, op.sizes().num_experts(), cuda::kMaxBiasSizes,
                      "experts of different sizes");
  cuda::check_limit(op, op.sizes().total(), INT32_MAX, "elements of biases");
  return 0;
}

cuda::BiasExperts experts_of(const ExpertBias& op, const Tensor& offsets) {
  cuda::BiasExperts experts = {};
  experts.count = static_cast<int>(op.sizes().num_experts());
  experts.offsets = offsets.as<int64_t>();
  experts.size = static_cast<int>(op.sizes().largest());
  experts.differ = !op.sizes().are_equal();
  if (!experts.differ) return experts;
  for (int e = 0; e < experts.count; ++e)
    experts.starts[e + 1] = experts.starts[e] + static_cast<int>(op.sizes()[e]);
  return experts;
}

template <typename Op>
cuda::BiasRows rows_of(const ExpertBias& op, const Args<Op>& args, const Tensor& rows) {
  const Tensor* row_offsets = args.find_in(Op::kRowOffsets);
  const Tensor* probs_R = args.find_in(Op::kProbs);
  const int64_t sparse_rows =
      row_offsets == nullptr ? 0 : (row_offsets->shape[0] - 1) * op.block_size();
  return {.dtype = rows.dtype,
          .max_rows = op.is_sparse() ? sparse_rows : rows.shape[0],
          .width = rows.shape[1],
          .first_column = static_cast<int>(op.first_column()),
          .block_size = static_cast<int>(op.block_size()),
          .row_offsets = row_offsets == nullptr ? nullptr : row_offsets->as<int32_t>(),
          .probs = probs_R == nullptr ? nullptr : probs_R->as<float>()};
}

void expert_bias(const ExpertBias& op, const Args<ExpertBias>& args) {
  using Op = ExpertBias;
  const Tensor& x = args.in(Op::kX);
  cuda::launch_expert_bias(rows_of(op, args, x), experts_of(op, args.in(Op::kOffsets)), x.data,
                           args.in(Op::kBias).as<float>(), args.out(Op::kY).data,
                           cuda::stream_of(args));
}

void expert_bias_backward(const ExpertBiasBackward& op, const Args<ExpertBiasBackward>& args) {
  using Op = ExpertBiasBackward;
  const Tensor& grad = args.in(Op::kGrad);
  const Tensor* bias = args.find_in(Op::kBias);
  const Tensor* grad_probs = args.find_out(Op::kGradProbs);
  const Tensor& grad_bias = args.out(Op::kGradBias);
  if (op.of_value()) {
    cuda::check(cudaMemsetAsync(grad_bias.data, 0, static_cast<size_t>(grad_bias.num_bytes()),
                                cuda::stream_of(args)));
  }
  cuda::launch_expert_bias_backward(
      rows_of(op.forward(), args, grad), experts_of(op.forward(), args.in(Op::kOffsets)),
      {.grad = grad.data,
       .bias = bias == nullptr ? nullptr : bias->as<float>(),
       .grad_probs = grad_probs == nullptr ? nullptr : grad_probs->as<float>(),
       .grad_bias = grad_bias ? grad_bias.as<float>() : nullptr},
      cuda::stream_of(args));
}

int64_t forward_workspace(const ExpertBias& op, std::span<const ValueType> /*inputs*/) {
  return check_experts(op);
}

int64_t backward_workspace(const ExpertBiasBackward& op, std::span<const ValueType> /*inputs*/) {
  return check_experts(op.forward());
}

}  // namespace

void add_expert_bias_cuda(KernelTable& table) {
  add_kernel<ExpertBias>(table, expert_bias, {.workspace = forward_workspace});
  add_kernel<ExpertBiasBackward>(table, expert_bias_backward, {.workspace = backward_workspace});
  add_kernel<ExpertBiasBackward>(table, ExpertBiasBackward::kOfValue, expert_bias_backward,
                                 {.workspace = backward_workspace});
}

}  // namespace tessera
