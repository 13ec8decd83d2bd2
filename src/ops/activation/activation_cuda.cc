#include "ops/activation/activation.h"
#include "ops/cuda/activation_rows.h"
#include "ops/cuda/row_args.h"

namespace tessera {
namespace {

/// The rows of input 0, of which `width` columns come out.
cuda::ActivationRows describe(const KernelArgs& args, Activation kind, int64_t width) {
  const Tensor& x = args.in(0);
  return {.kind = kind,
          .dtype = x.dtype,
          .rows = cuda::rows_of(args, 0, x.shape[1]),
          .size = width,
          .in_width = x.shape[1],
          .out_width = width,
          .in = x.data,
          .probs = nullptr};
}

void activation(const Operator& op, const KernelArgs& args) {
  const Activation kind = static_cast<const ActivationOp&>(op).kind();
  cuda::launch_activation(describe(args, kind, args.out(0).shape[1]), {}, args.out(0).data,
                          cuda::stream_of(args));
}

void activation_backward(const Operator& op, const KernelArgs& args) {
  const Activation kind = static_cast<const ActivationBackward&>(op).kind();
  cuda::launch_activation_backward(
      describe(args, kind, args.in(1).shape[1]), {},
      {.grad = args.in(1).data, .grad_in = args.out(0).data, .grad_probs = nullptr},
      cuda::stream_of(args));
}

}  // namespace

void add_activation_cuda(KernelTable& table) {
  table["activation"] = activation;
  table["activation_backward"] = activation_backward;
}

}  // namespace tessera
