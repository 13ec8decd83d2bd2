#include "ops/cuda/row_args.h"
#include "ops/repeat_heads/repeat_heads.h"
#include "ops/repeat_heads/repeat_heads_kernels.h"

namespace tessera {
namespace {

/// `once` is the tensor without copies.
cuda::HeadCopies describe(const Operator& op, const KernelArgs& args, const Tensor& once) {
  const auto& heads = static_cast<const HeadRepetition&>(op);
  return {.dtype = once.dtype,
          .rows = cuda::rows_of(args, 0, args.in(0).shape[1]),
          .num_heads = static_cast<int>(heads.num_heads()),
          .head_size = static_cast<int>(once.shape[1] / heads.num_heads()),
          .times = static_cast<int>(heads.times()),
          .in = args.in(0).data,
          .out = args.out(0).data};
}

void repeat_heads(const Operator& op, const KernelArgs& args) {
  cuda::launch_repeat_heads(describe(op, args, args.in(0)), cuda::stream_of(args));
}

void sum_heads(const Operator& op, const KernelArgs& args) {
  cuda::launch_sum_heads(describe(op, args, args.out(0)), cuda::stream_of(args));
}

}  // namespace

void add_repeat_heads_cuda(KernelTable& table) {
  table["repeat_heads"] = repeat_heads;
  table["sum_heads"] = sum_heads;
}

}  // namespace tessera
