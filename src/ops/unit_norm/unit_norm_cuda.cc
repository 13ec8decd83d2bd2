#include "ops/cuda/row_args.h"
#include "ops/unit_norm/unit_norm.h"
#include "ops/unit_norm/unit_norm_kernels.h"

namespace tessera {
namespace {

template <typename Op>
cuda::UnitNormRows describe(const Op& op, const Args<Op>& args) {
  const Tensor& x = args.in(Op::kX);
  return {.dtype = x.dtype,
          .rows = cuda::rows_of(args, Op::kX, op.head_size()),
          .size = op.head_size(),
          .eps = op.eps(),
          .x = x.data};
}

void unit_norm(const UnitNorm& op, const Args<UnitNorm>& args) {
  cuda::launch_unit_norm(describe(op, args), args.out(UnitNorm::kY).data, cuda::stream_of(args));
}

void unit_norm_backward(const UnitNormBackward& op, const Args<UnitNormBackward>& args) {
  using Op = UnitNormBackward;
  cuda::launch_unit_norm_backward(describe(op, args), args.in(Op::kGrad).data,
                                  args.out(Op::kGradX).data, cuda::stream_of(args));
}

}  // namespace

void add_unit_norm_cuda(KernelTable& table) {
  add_kernel<UnitNorm>(table, unit_norm);
  add_kernel<UnitNormBackward>(table, unit_norm_backward);
}

}  // namespace tessera
