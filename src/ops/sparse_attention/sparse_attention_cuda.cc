#include <algorithm>

#include "ops/cuda/context.h"
#include "ops/cuda/limits.h"
#include "ops/sparse_attention/sparse_attention.h"
#include "ops/sparse_attention/sparse_attention_kernels.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

/// `chosen` is another input of the backward pass.
cuda::SparseQueries describe(const AttentionSpec& spec, const KernelArgs& args,
                             const Tensor& chosen) {
  using Op = SparseAttention;
  return {.dtype = args.in(Op::kQ).dtype,
          .num_tokens = args.in(Op::kQ).shape[0],
          .num_rows = args.in(Op::kK).shape[0],
          .num_heads = static_cast<int>(spec.num_heads),
          .num_kv_heads = static_cast<int>(spec.num_kv_heads),
          .head_size = static_cast<int>(spec.head_size),
          .head_size_v = static_cast<int>(spec.head_size_v),
          .top_k = static_cast<int>(chosen.shape[1]),
          .scale = static_cast<float>(spec.scale),
          .q = args.in(Op::kQ).data,
          .k = args.in(Op::kK).data,
          .v = args.in(Op::kV).data,
          .chosen = chosen.as<int32_t>()};
}

void sparse_attention(const SparseAttention& op, const KernelArgs& args) {
  cuda::launch_sparse_attention(describe(op.spec(), args, args.in(SparseAttention::kChosen)),
                                args.out(attention::kO).data, args.out(attention::kLse).as<float>(),
                                cuda::stream_of(args));
}

struct BackwardLayout {
  BackwardLayout(const AttentionSpec& spec, int64_t num_tokens, int64_t num_rows)
      : delta(layout.add<float>(spec.num_heads * num_tokens)),
        choosers(layout.add<uint32_t>(num_rows * cuda::chooser_words(num_tokens))) {}

  WorkspaceLayout layout;
  int64_t delta;
  int64_t choosers;
};

void sparse_attention_backward(const SparseAttentionBackward& op, const KernelArgs& args) {
  using Op = SparseAttentionBackward;
  const BackwardLayout at(op.spec(), args.in(Op::kQ).shape[0], args.in(Op::kK).shape[0]);
  const bool has_grad_lse = std::ssize(args.inputs) > Op::kGradLse;
  const cuda::SparseGrads grads = {
      .o = args.in(Op::kSavedO).data,
      .lse = args.in(Op::kSavedLse).as<float>(),
      .grad_o = args.in(Op::kGradO).data,
      .grad_lse = has_grad_lse ? args.in(Op::kGradLse).as<float>() : nullptr,
      .delta = workspace_part<float>(args.workspace, at.delta),
      .choosers = workspace_part<uint32_t>(args.workspace, at.choosers),
      .grad_q = args.out(attention::kGradQ).data,
      .grad_k = args.out(attention::kGradK).data,
      .grad_v = args.out(attention::kGradV).data};
  cuda::launch_sparse_attention_backward(describe(op.spec(), args, args.in(Op::kChosen)), grads,
                                         cuda::stream_of(args));
}

void check_sizes(const AttentionOperator& op) {
  cuda::check_limit(op, std::max(op.spec().head_size, op.spec().head_size_v),
                    cuda::kMostSparseHeadSize, "elements of a head");
}

int64_t forward_workspace(const SparseAttention& op, std::span<const ValueType> /*inputs*/) {
  check_sizes(op);
  return 0;
}

int64_t backward_workspace(const SparseAttentionBackward& op, std::span<const ValueType> inputs) {
  using Op = SparseAttentionBackward;
  check_sizes(op);
  return BackwardLayout(op.spec(), inputs[Op::kQ].shape[0], inputs[Op::kK].shape[0])
      .layout.num_bytes();
}

}  // namespace

void add_sparse_attention_cuda(KernelTable& table) {
  add_kernel<SparseAttention>(table, sparse_attention, {.workspace = forward_workspace});
  add_kernel<SparseAttentionBackward>(table, sparse_attention_backward,
                                      {.workspace = backward_workspace});
}

}  // namespace tessera
