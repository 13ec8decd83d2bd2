#include <algorithm>

#include "ops/attention/attention_cuda.h"
#include "ops/attention/large_heads.h"
#include "ops/cuda/check.h"
#include "ops/cuda/context.h"
#include "ops/cuda/limits.h"
#include "ops/sparse_attention/sparse_attention.h"
#include "ops/sparse_attention/sparse_attention_kernels.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

namespace large = cuda::large_heads;

/// Units of 64 queries have room for so many elements; where a token's heads have fewer than a
/// sixteenth, plain kernels take them.
constexpr int64_t kUnitElements = large::kRows * large::kMostSizeV;

bool uses_tensor_cores(const AttentionOperator& op, DType dtype) {
  const AttentionSpec& spec = op.spec();
  const int64_t heads = std::min<int64_t>(op.group_size(), large::kRows);
  return dtype == DType::kBF16 && large::fits(spec.head_size, spec.head_size_v) &&
         heads * spec.head_size * 16 >= kUnitElements;
}

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

/// The same for the kernels on tensor cores.
large::Params describe_large(const AttentionOperator& op, const KernelArgs& args,
                             const Tensor& chosen) {
  const cuda::SparseQueries call = describe(op.spec(), args, chosen);
  cuda::attention::check_sizes(op, op.spec(), call.num_tokens);
  cuda::attention::check_sizes(op, op.spec(), call.num_rows);
  return {.heads = {.num_heads = call.num_heads,
                    .num_kv_heads = call.num_kv_heads,
                    .head_size = call.head_size,
                    .head_size_v = call.head_size_v,
                    .window = 0,
                    .chunk = 0,
                    .num_rows = call.num_tokens,
                    .scale = call.scale},
          .num_rows = static_cast<int>(call.num_rows),
          .num_sms = cuda::context_of(args).num_sms(),
          .q = call.q,
          .k = call.k,
          .v = call.v,
          .chosen = call.chosen,
          .top_k = call.top_k};
}

void sparse_attention(const SparseAttention& op, const KernelArgs& args) {
  const Tensor& chosen = args.in(SparseAttention::kChosen);
  void* const o = args.out(attention::kO).data;
  auto* const lse = args.out(attention::kLse).as<float>();
  if (!uses_tensor_cores(op, args.in(SparseAttention::kQ).dtype))
    return cuda::launch_sparse_attention(describe(op.spec(), args, chosen), o, lse,
                                         cuda::stream_of(args));
  large::Params params = describe_large(op, args, chosen);
  params.o = o;
  params.lse = lse;
  if (params.heads.num_rows > 0) large::launch_forward(params, cuda::stream_of(args));
}

struct BackwardLayout {
  BackwardLayout(const AttentionSpec& spec, int64_t num_tokens, int64_t num_rows)
      : delta(layout.add<float>(spec.num_heads * num_tokens)),
        choosers(layout.add<uint32_t>(num_rows * cuda::chooser_words(num_tokens))) {}

  WorkspaceLayout layout;
  int64_t delta;
  int64_t choosers;
};

struct LargeLayout {
  LargeLayout(const AttentionSpec& spec, int64_t num_tokens, int64_t num_rows)
      : num_tiles(large::num_key_tiles(num_rows)),
        num_slots(large::most_slots(num_tokens, num_rows)),
        delta(layout.add<float>(spec.num_heads * num_tokens)),
        masks(layout.add<uint64_t>(num_tiles * num_tokens)),
        tokens(layout.add<int>(num_tiles * num_tokens)),
        counts(layout.add<int>(num_tiles)),
        slots(layout.add<int2>(num_tiles)),
        chunks(layout.add<large::Chunk>(num_tiles + large::kMoreBlocks)),
        num_chunks(layout.add<int>(1)),
        sums(layout.add<float>(spec.num_kv_heads * num_slots * large::kRows *
                               std::max(spec.head_size, spec.head_size_v))) {}

  large::Choosers choosers(const KernelArgs& args) const {
    const std::span<std::byte> room = args.workspace;
    return {.masks = workspace_part<uint64_t>(room, masks),
            .tokens = workspace_part<int>(room, tokens),
            .counts = workspace_part<int>(room, counts),
            .slots = workspace_part<int2>(room, slots),
            .chunks = workspace_part<large::Chunk>(room, chunks),
            .num_chunks = workspace_part<int>(room, num_chunks),
            .num_slots = static_cast<int>(num_slots)};
  }

  WorkspaceLayout layout;
  int64_t num_tiles;
  int64_t num_slots;
  int64_t delta;
  int64_t masks;
  int64_t tokens;
  int64_t counts;
  int64_t slots;
  int64_t chunks;
  int64_t num_chunks;
  int64_t sums;
};

void run_plain_backward(const SparseAttentionBackward& op, const KernelArgs& args) {
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

void run_large_backward(const SparseAttentionBackward& op, const KernelArgs& args) {
  using Op = SparseAttentionBackward;
  const LargeLayout at(op.spec(), args.in(Op::kQ).shape[0], args.in(Op::kK).shape[0]);
  const bool has_grad_lse = std::ssize(args.inputs) > Op::kGradLse;
  const cudaStream_t stream = cuda::stream_of(args);
  auto* const delta = workspace_part<float>(args.workspace, at.delta);
  large::Params params = describe_large(op, args, args.in(Op::kChosen));
  params.lse = args.in(Op::kSavedLse).as<float>();
  params.grad_o = args.in(Op::kGradO).data;
  params.delta = delta;
  params.grad_q = args.out(attention::kGradQ).data;
  params.grad_k = args.out(attention::kGradK).data;
  params.grad_v = args.out(attention::kGradV).data;
  params.choosers = at.choosers(args);
  params.sums = workspace_part<float>(args.workspace, at.sums);
  cuda::attention::launch_delta(
      {.o = args.in(Op::kSavedO).data,
       .grad_o = params.grad_o,
       .grad_lse = has_grad_lse ? args.in(Op::kGradLse).as<float>() : nullptr,
       .delta = delta,
       .num_rows = params.heads.num_rows,
       .num_heads = params.heads.num_heads,
       .head_size_v = params.heads.head_size_v},
      DType::kBF16, stream);
  large::launch_query_grad(params, stream);
  if (params.num_rows > 0) large::launch_key_grads(params, stream);
}

/// Of keys that no token chose, for there is none.
void clear_key_grads(const KernelArgs& args) {
  for (const auto output : {attention::kGradK, attention::kGradV}) {
    const Tensor& grad = args.out(output);
    cuda::check(cudaMemsetAsync(grad.data, 0, grad.num_bytes(), cuda::stream_of(args)));
  }
}

void sparse_attention_backward(const SparseAttentionBackward& op, const KernelArgs& args) {
  const Tensor& q = args.in(SparseAttentionBackward::kQ);
  if (q.shape[0] == 0) return clear_key_grads(args);
  if (uses_tensor_cores(op, q.dtype)) {
    run_large_backward(op, args);
  } else {
    run_plain_backward(op, args);
  }
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
  const int64_t num_tokens = inputs[Op::kQ].shape[0];
  const int64_t num_rows = inputs[Op::kK].shape[0];
  return uses_tensor_cores(op, inputs[Op::kQ].dtype)
             ? LargeLayout(op.spec(), num_tokens, num_rows).layout.num_bytes()
             : BackwardLayout(op.spec(), num_tokens, num_rows).layout.num_bytes();
}

}  // namespace

void add_sparse_attention_cuda(KernelTable& table) {
  add_kernel<SparseAttention>(table, sparse_attention, {.workspace = forward_workspace});
  add_kernel<SparseAttentionBackward>(table, sparse_attention_backward,
                                      {.workspace = backward_workspace});
}

}  // namespace tessera
