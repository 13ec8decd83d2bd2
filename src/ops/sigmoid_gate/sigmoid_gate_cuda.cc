#include "ops/cuda/row_args.h"
#include "ops/sigmoid_gate/sigmoid_gate.h"
#include "ops/sigmoid_gate/sigmoid_gate_kernels.h"

namespace tessera {
namespace {

template <typename Op>
cuda::SigmoidGateRows describe(const Op& op, const Args<Op>& args) {
  const Tensor& y = args.in(Op::kX);
  const int64_t width = y.shape[1];
  const Tensor& logit = args.in(Op::kLogit);
  const int64_t groups = logit.shape.rank() == 1 ? 1 : logit.shape[1];
  const bool of_elements = groups != 1 && groups == width;
  const int64_t heads = of_elements ? 1 : groups;
  cuda::RowCount rows = cuda::rows_of(args, Op::kX, width);
  rows.bound *= heads;
  rows.scale *= heads;
  return {.dtype = y.dtype,
          .rows = rows,
          .width = width / heads,
          .of_elements = of_elements,
          .function = op.spec().function,
          .y = y.data,
          .logit = logit.data};
}

void sigmoid_gate(const SigmoidGate& op, const Args<SigmoidGate>& args) {
  cuda::launch_sigmoid_gate(describe(op, args), args.out(SigmoidGate::kY).data,
                            cuda::stream_of(args));
}

void sigmoid_gate_backward(const SigmoidGateBackward& op, const Args<SigmoidGateBackward>& args) {
  using Op = SigmoidGateBackward;
  cuda::launch_sigmoid_gate_backward(describe(op, args),
                                     {.grad = args.in(Op::kGrad).data,
                                      .grad_y = args.out(Op::kGradX).data,
                                      .grad_logit = args.out(Op::kGradLogit).data},
                                     cuda::stream_of(args));
}

}  // namespace

void add_sigmoid_gate_cuda(KernelTable& table) {
  add_kernel<SigmoidGate>(table, sigmoid_gate, {.workspace = cuda::no_workspace_first_ragged});
  add_kernel<SigmoidGateBackward>(table, sigmoid_gate_backward,
                                  {.workspace = cuda::no_workspace_first_ragged});
}

}  // namespace tessera
