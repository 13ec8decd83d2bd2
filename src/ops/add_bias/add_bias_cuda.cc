#include "ops/add_bias/add_bias.h"
#include "ops/add_bias/add_bias_kernels.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/row_args.h"

namespace tessera {
namespace {

void add_bias(const AddBias& /*op*/, const Args<AddBias>& args) {
  const Tensor& x = args.in(AddBias::kX);
  const int64_t width = x.shape[1];
  cuda::launch_add_bias({.dtype = x.dtype,
                         .rows = cuda::rows_of(args, AddBias::kX, width),
                         .width = width,
                         .x = x.data,
                         .bias = args.in(AddBias::kBias).as<float>(),
                         .y = args.out(AddBias::kY).data},
                        cuda::stream_of(args));
}

void add_bias_grad(const AddBiasGrad& /*op*/, const Args<AddBiasGrad>& args) {
  using Op = AddBiasGrad;
  if (!args.out(Op::kGradBias)) return;
  const Tensor& grad = args.in(Op::kGrad);
  const int64_t width = grad.shape[1];
  cuda::launch_column_sums({.dtype = grad.dtype,
                            .rows = cuda::rows_of(args, Op::kGrad, width),
                            .cols = width,
                            .x = grad.data,
                            .accumulator = cuda::accumulator_of(args, args.out(Op::kGradBias)),
                            .partials = reinterpret_cast<float*>(args.workspace.data()),
                            .num_sms = cuda::context_of(args).num_sms()},
                           cuda::stream_of(args));
}

int64_t add_bias_grad_workspace(const AddBiasGrad& /*op*/, std::span<const ValueType> inputs) {
  return cuda::column_sums_bytes(inputs[AddBiasGrad::kGrad].shape[1]);
}

}  // namespace

void add_add_bias_cuda(KernelTable& table) {
  add_kernel<AddBias>(table, add_bias);
  add_kernel<AddBiasGrad>(table, add_bias_grad,
                          {.workspace = add_bias_grad_workspace, .sets_accumulators = true});
}

}  // namespace tessera
