#include "ops/cuda/row_args.h"
#include "ops/sigmoid_gate/sigmoid_gate.h"
#include "ops/sigmoid_gate/sigmoid_gate_kernels.h"

namespace tessera {
namespace {

cuda::SigmoidGateRows describe(const KernelArgs& args) {
  const Tensor& y = args.in(0);
  return {.dtype = y.dtype,
          .rows = cuda::rows_of(args, 0, y.shape[1]),
          .width = y.shape[1],
          .y = y.data,
          .logit = args.in(1).data};
}

void sigmoid_gate(const Operator& /*op*/, const KernelArgs& args) {
  cuda::launch_sigmoid_gate(describe(args), args.out(0).data, cuda::stream_of(args));
}

void sigmoid_gate_backward(const Operator& /*op*/, const KernelArgs& args) {
  cuda::launch_sigmoid_gate_backward(
      describe(args),
      {.grad = args.in(2).data, .grad_y = args.out(0).data, .grad_logit = args.out(1).data},
      cuda::stream_of(args));
}

}  // namespace

void add_sigmoid_gate_cuda(KernelTable& table) {
  table["sigmoid_gate"] = Kernel(sigmoid_gate, cuda::no_workspace_first_ragged);
  table["sigmoid_gate_backward"] = Kernel(sigmoid_gate_backward, cuda::no_workspace_first_ragged);
}

}  // namespace tessera
