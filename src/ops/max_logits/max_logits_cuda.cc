#include "ops/cuda/context.h"
#include "ops/max_logits/max_logits.h"
#include "ops/max_logits/max_logits_kernels.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

using Op = MaxLogits;

void max_logits(const Op& op, const Args<Op>& args) {
  const AttentionSpec& spec = op.spec();
  const Tensor& q = args.in(Op::kQ);
  cuda::launch_max_logits({.dtype = q.dtype,
                           .q = q.data,
                           .k = args.in(Op::kK).data,
                           .lse = args.in(Op::kLse).as<float>(),
                           .cu_seqlens = args.in(Op::kCuSeqlens).as<int32_t>(),
                           .num_sequences = static_cast<int>(args.in(Op::kCuSeqlens).shape[0] - 1),
                           .partial = workspace_part<float>(args.workspace, 0),
                           .result = args.out(Op::kMax).as<float>(),
                           .num_queries = q.shape[0],
                           .heads = static_cast<int>(spec.num_heads),
                           .kv_heads = static_cast<int>(spec.num_kv_heads),
                           .head_size = static_cast<int>(spec.head_size),
                           .window = spec.window,
                           .scale = static_cast<float>(spec.scale),
                           .limit = op.limit(),
                           .rows = op.rows()},
                          cuda::stream_of(args));
}

int64_t max_logits_workspace(const Op& op, std::span<const ValueType> inputs) {
  return op.spec().num_heads * cuda::num_logit_parts(inputs[Op::kQ].shape[0]) *
         dtype_size(DType::kF32);
}

}  // namespace

void add_max_logits_cuda(KernelTable& table) {
  add_kernel<Op>(table, max_logits, {.workspace = max_logits_workspace});
}

}  // namespace tessera
