#include "ops/cuda/check.h"
#include "ops/cuda/column_sums.h"
#include "ops/cuda/context.h"
#include "ops/spread_norm/spread_norm.h"
#include "ops/spread_norm/spread_norm_kernels.h"

namespace tessera {
namespace {

using namespace cuda;

SpreadRows rows_of(const Tensor& x) {
  return {.dtype = x.dtype, .num_rows = x.shape[0], .width = x.shape[1]};
}

SpreadNormRows norm_of(const SpreadNormSpec& spec, const KernelArgs& args) {
  return {.rows = rows_of(args.in(0)),
          .num_elements = static_cast<float>(spec.num_elements),
          .eps = static_cast<float>(spec.eps),
          .x = args.in(0).data,
          .weight = args.in(1).as<float>(),
          .square_sums = args.in(2).as<float>()};
}

void square_sums(const Operator& /*op*/, const KernelArgs& args) {
  launch_square_sums(rows_of(args.in(0)), args.in(0).data, args.out(0).as<float>(),
                     stream_of(args));
  check(cudaGetLastError());
}

void square_sums_backward(const Operator& /*op*/, const KernelArgs& args) {
  launch_square_sums_backward(rows_of(args.in(0)), args.in(0).data, args.in(1).as<float>(),
                              args.out(0).data, stream_of(args));
  check(cudaGetLastError());
}

void spread_norm(const Operator& op, const KernelArgs& args) {
  launch_spread_norm(norm_of(static_cast<const SpreadNorm&>(op).spec(), args), args.out(0).data,
                     stream_of(args));
  check(cudaGetLastError());
}

void spread_norm_backward(const Operator& op, const KernelArgs& args) {
  launch_spread_norm_backward(norm_of(static_cast<const SpreadNormBackward&>(op).spec(), args),
                              {.grad = args.in(3).data,
                               .grad_x = args.out(0).data,
                               .grad_sums = args.out(1).as<float>(),
                               .partials = reinterpret_cast<float*>(args.workspace.data()),
                               .grad_weight = args.out(2) ? args.out(2).as<float>() : nullptr,
                               .num_sms = context_of(args).num_sms()},
                              stream_of(args));
  check(cudaGetLastError());
}

int64_t backward_workspace(const Operator& /*op*/, std::span<const ValueType> inputs) {
  return column_sums_bytes(inputs[0].shape[1]);
}

}  // namespace

void add_spread_norm_cuda(KernelTable& table) {
  table["square_sums"] = square_sums;
  table["square_sums_backward"] = square_sums_backward;
  table["spread_norm"] = spread_norm;
  table["spread_norm_backward"] = Kernel(spread_norm_backward, backward_workspace);
}

}  // namespace tessera
