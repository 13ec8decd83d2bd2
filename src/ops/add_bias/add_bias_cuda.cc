#include "ops/add_bias/add_bias.h"
#include "ops/add_bias/add_bias_kernels.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/row_args.h"

namespace tessera {
namespace {

void add_bias(const Operator& /*op*/, const KernelArgs& args) {
  const Tensor& x = args.in(0);
  const int64_t width = x.shape[1];
  cuda::launch_add_bias({.dtype = x.dtype,
                         .rows = cuda::rows_of(args, 0, width),
                         .width = width,
                         .x = x.data,
                         .bias = args.in(1).as<float>(),
                         .y = args.out(0).data},
                        cuda::stream_of(args));
}

void add_bias_grad(const Operator& /*op*/, const KernelArgs& args) {
  if (!args.out(0)) return;
  const Tensor& grad = args.in(0);
  const int64_t width = grad.shape[1];
  cuda::launch_column_sums({.dtype = grad.dtype,
                            .rows = cuda::rows_of(args, 0, width),
                            .cols = width,
                            .x = grad.data,
                            .accumulator = args.out(0).as<float>(),
                            .partials = reinterpret_cast<float*>(args.workspace.data()),
                            .num_sms = cuda::context_of(args).num_sms()},
                           cuda::stream_of(args));
}

int64_t add_bias_grad_workspace(const Operator& /*op*/, std::span<const ValueType> inputs) {
  return cuda::column_sums_bytes(inputs[0].shape[1]);
}

}  // namespace

void add_add_bias_cuda(KernelTable& table) {
  table["add_bias"] = add_bias;
  table["add_bias_grad"] = Kernel(add_bias_grad, add_bias_grad_workspace);
}

}  // namespace tessera
