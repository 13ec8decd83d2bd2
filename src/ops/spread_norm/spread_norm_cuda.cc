#include "ops/cuda/column_sums.h"
#include "ops/cuda/row_args.h"
#include "ops/spread_norm/spread_norm.h"
#include "ops/spread_norm/spread_norm_kernels.h"

namespace tessera {
namespace {

using namespace cuda;

SpreadRows rows_of(const Tensor& x) {
  return {.dtype = x.dtype, .num_rows = x.shape[0], .width = x.shape[1]};
}

template <typename Op>
SpreadNormRows norm_of(const SpreadNormSpec& spec, const Args<Op>& args) {
  return {.rows = rows_of(args.in(Op::kX)),
          .num_elements = static_cast<float>(spec.num_elements),
          .eps = static_cast<float>(spec.eps),
          .x = args.in(Op::kX).data,
          .weight = args.in(Op::kWeight).template as<float>(),
          .square_sums = args.in(Op::kSquareSums).template as<float>()};
}

void square_sums(const SquareSums& /*op*/, const Args<SquareSums>& args) {
  using Op = SquareSums;
  launch_square_sums(rows_of(args.in(Op::kX)), args.in(Op::kX).data,
                     args.out(Op::kSums).as<float>(), stream_of(args));
}

void square_sums_backward(const SquareSumsBackward& /*op*/, const Args<SquareSumsBackward>& args) {
  using Op = SquareSumsBackward;
  launch_square_sums_backward(rows_of(args.in(Op::kX)), args.in(Op::kX).data,
                              args.in(Op::kGrad).as<float>(), args.out(Op::kGradX).data,
                              stream_of(args));
}

void spread_norm(const SpreadNorm& op, const Args<SpreadNorm>& args) {
  launch_spread_norm(norm_of(op.spec(), args), args.out(SpreadNorm::kY).data, stream_of(args));
}

void spread_norm_backward(const SpreadNormBackward& op, const Args<SpreadNormBackward>& args) {
  using Op = SpreadNormBackward;
  launch_spread_norm_backward(norm_of(op.spec(), args),
                              {.grad = args.in(Op::kGrad).data,
                               .grad_x = args.out(Op::kGradX).data,
                               .grad_sums = args.out(Op::kGradSquareSums).as<float>(),
                               .partials = reinterpret_cast<float*>(args.workspace.data()),
                               .grad_weight = cuda::accumulator_of(args, args.out(Op::kGradWeight)),
                               .num_sms = context_of(args).num_sms()},
                              stream_of(args));
}

int64_t backward_workspace(const SpreadNormBackward& /*op*/, std::span<const ValueType> inputs) {
  return column_sums_bytes(inputs[SpreadNormBackward::kX].shape[1]);
}

}  // namespace

void add_spread_norm_cuda(KernelTable& table) {
  add_kernel<SquareSums>(table, square_sums);
  add_kernel<SquareSumsBackward>(table, square_sums_backward);
  add_kernel<SpreadNorm>(table, spread_norm);
  add_kernel<SpreadNormBackward>(table, spread_norm_backward,
                                 {.workspace = backward_workspace, .sets_accumulators = true});
}

}  // namespace tessera
