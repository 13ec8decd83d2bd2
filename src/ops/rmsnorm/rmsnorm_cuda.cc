#include "ops/cuda/column_sums.h"
#include "ops/cuda/row_args.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rmsnorm/rmsnorm_kernels.h"

namespace tessera {
namespace {

void rmsnorm(const RmsNorm& op, const Args<RmsNorm>& args) {
  const Tensor& x = args.in(RmsNorm::kX);
  const int64_t hidden = args.in(RmsNorm::kWeight).shape[0];
  cuda::launch_rmsnorm({.dtype = x.dtype,
                        .rows = cuda::rows_of(args, RmsNorm::kX, hidden),
                        .hidden = hidden,
                        .eps = op.eps(),
                        .x = x.data,
                        .weight = args.in(RmsNorm::kWeight).as<float>(),
                        .y = args.out(RmsNorm::kY).data,
                        .rstd = args.out(RmsNorm::kRstd).as<float>(),
                        .num_sms = cuda::context_of(args).num_sms()},
                       cuda::stream_of(args));
}

void rmsnorm_backward(const RmsNormBackward& op, const Args<RmsNormBackward>& args) {
  using Op = RmsNormBackward;
  const bool addend = op.addend();
  const Tensor& x = args.in(Op::kX);
  const int64_t hidden = args.in(Op::kWeight).shape[0];
  cuda::launch_rmsnorm_backward(
      {.dtype = x.dtype,
       .rows = cuda::rows_of(args, Op::kX, hidden),
       .hidden = hidden,
       .x = x.data,
       .weight = args.in(Op::kWeight).as<float>(),
       .rstd = args.in(Op::kForwardRstd).as<float>(),
       .grad = args.in(Op::kGrad).data,
       .addend = addend ? args.in(Op::kAddend).data : nullptr,
       .grad_x = args.out(Op::kGradX).data,
       .grad_weight = cuda::accumulator_of(args, args.out(Op::kGradWeight)),
       .partials = reinterpret_cast<float*>(args.workspace.data()),
       .num_sms = cuda::context_of(args).num_sms()},
      cuda::stream_of(args));
}

int64_t backward_workspace(const RmsNormBackward& op, std::span<const ValueType> inputs) {
  cuda::no_workspace_first_ragged(op, inputs);
  return cuda::column_partials_bytes(inputs[RmsNormBackward::kWeight].shape[0]);
}

}  // namespace

void add_rmsnorm_cuda(KernelTable& table) {
  add_kernel<RmsNorm>(table, rmsnorm, {.workspace = cuda::no_workspace_first_ragged});
  add_kernel<RmsNormBackward>(table, rmsnorm_backward,
                              {.workspace = backward_workspace, .sets_accumulators = true});
}

}  // namespace tessera
