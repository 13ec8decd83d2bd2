#include "ops/cuda/row_args.h"
#include "ops/repeat_heads/repeat_heads.h"
#include "ops/repeat_heads/repeat_heads_kernels.h"

namespace tessera {
namespace {

/// `once` is the tensor without copies.
template <typename Op>
cuda::HeadCopies describe(const Op& heads, const Args<Op>& args, const Tensor& once) {
  return {.dtype = once.dtype,
          .rows = cuda::rows_of(args, Op::kX, args.in(Op::kX).shape[1]),
          .num_heads = static_cast<int>(heads.num_heads()),
          .head_size = static_cast<int>(once.shape[1] / heads.num_heads()),
          .times = static_cast<int>(heads.times()),
          .in = args.in(Op::kX).data,
          .out = args.out(Op::kY).data};
}

void repeat_heads(const RepeatHeads& op, const Args<RepeatHeads>& args) {
  cuda::launch_repeat_heads(describe(op, args, args.in(RepeatHeads::kX)), cuda::stream_of(args));
}

void sum_heads(const SumHeads& op, const Args<SumHeads>& args) {
  cuda::launch_sum_heads(describe(op, args, args.out(SumHeads::kY)), cuda::stream_of(args));
}

}  // namespace

void add_repeat_heads_cuda(KernelTable& table) {
  add_kernel<RepeatHeads>(table, repeat_heads);
  add_kernel<SumHeads>(table, sum_heads);
}

}  // namespace tessera
