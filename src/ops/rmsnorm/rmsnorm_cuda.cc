#include "ops/cuda/column_sums.h"
#include "ops/cuda/row_args.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rmsnorm/rmsnorm_kernels.h"

namespace tessera {
namespace {

void rmsnorm(const Operator& op, const KernelArgs& args) {
  const Tensor& x = args.in(0);
  const int64_t hidden = args.in(1).shape[0];
  cuda::launch_rmsnorm({.dtype = x.dtype,
                        .rows = cuda::rows_of(args, 0, hidden),
                        .hidden = hidden,
                        .eps = static_cast<const RmsNorm&>(op).eps(),
                        .x = x.data,
                        .weight = args.in(1).as<float>(),
                        .y = args.out(0).data,
                        .rstd = args.out(1).as<float>(),
                        .num_sms = cuda::context_of(args).num_sms()},
                       cuda::stream_of(args));
}

void rmsnorm_backward(const Operator& op, const KernelArgs& args) {
  const bool addend = static_cast<const RmsNormBackward&>(op).addend();
  const Tensor& x = args.in(0);
  const int64_t hidden = args.in(1).shape[0];
  cuda::launch_rmsnorm_backward({.dtype = x.dtype,
                                 .rows = cuda::rows_of(args, 0, hidden),
                                 .hidden = hidden,
                                 .x = x.data,
                                 .weight = args.in(1).as<float>(),
                                 .rstd = args.in(2).as<float>(),
                                 .grad = args.in(3).data,
                                 .addend = addend ? args.in(4).data : nullptr,
                                 .grad_x = args.out(0).data,
                                 .grad_weight = args.out(1) ? args.out(1).as<float>() : nullptr,
                                 .partials = reinterpret_cast<float*>(args.workspace.data()),
                                 .num_sms = cuda::context_of(args).num_sms()},
                                cuda::stream_of(args));
}

int64_t backward_workspace(const Operator& op, std::span<const ValueType> inputs) {
  cuda::no_workspace_first_ragged(op, inputs);
  return cuda::column_partials_bytes(inputs[1].shape[0]);
}

}  // namespace

void add_rmsnorm_cuda(KernelTable& table) {
  table["rmsnorm"] = Kernel(rmsnorm, cuda::no_workspace_first_ragged);
  table["rmsnorm_backward"] = Kernel(rmsnorm_backward, backward_workspace);
}

}  // namespace tessera
