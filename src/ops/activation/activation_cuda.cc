#include "ops/activation/activation.h"
#include "ops/cuda/activation_rows.h"
#include "ops/cuda/row_args.h"
#include "ops/scaled_rows.h"

namespace tessera {
namespace {

/// The rows of x, of which `width` columns come out.
template <typename Op>
cuda::ActivationRows describe(const Args<Op>& args, const ActivationFunction& function,
                              int64_t width) {
  const Tensor& x = args.in(Op::kX);
  return {.function = function,
          .dtype = x.dtype,
          .rows = cuda::rows_of(args, Op::kX, x.shape[1]),
          .size = width,
          .in_width = x.shape[1],
          .out_width = width,
          .in = x.data,
          .probs = nullptr};
}

void activation(const ActivationOp& op, const Args<ActivationOp>& args) {
  cuda::launch_activation(describe(args, op.function(), args.out(ActivationOp::kY).shape[1]), {},
                          args.out(ActivationOp::kY).data, {}, cuda::stream_of(args));
}

void activation_backward(const ActivationBackward& op, const Args<ActivationBackward>& args) {
  using Op = ActivationBackward;
  const Tensor& x = args.in(Op::kX);
  const Tensor& grad = args.in(Op::kGrad);
  cuda::ActivationRows rows = describe(args, op.function(), grad.shape[1]);
  rows.dtype = grad.dtype;
  const cuda::ActivationGrads grads = {
      .grad = grad.data, .grad_in = args.out(Op::kGradX).data, .grad_probs = nullptr};
  if (op.x_format() == RowFormat::kValues)
    return cuda::launch_activation_backward(rows, {}, grads, cuda::stream_of(args));
  cuda::launch_scaled_activation_backward(
      rows,
      {.scales = row_scales_of(x).as<float>(),
       .columns_of_scale = columns_of_scale(x.scale, x.shape[1])},
      {}, grads, cuda::stream_of(args));
}

}  // namespace

void add_activation_cuda(KernelTable& table) {
  add_kernel<ActivationOp>(table, activation);
  add_kernel<ActivationBackward>(table, activation_backward, {.takes = takes_scaled_rows});
}

}  // namespace tessera
