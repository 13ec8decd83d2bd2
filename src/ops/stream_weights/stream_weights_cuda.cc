#include <algorithm>

#include "ops/cuda/row_args.h"
#include "ops/stream_weights/stream_weights.h"
#include "ops/stream_weights/stream_weights_kernels.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

template <typename Op>
cuda::StreamTokens describe(const StreamWeightsSpec& spec, const Args<Op>& args) {
  return {.rule = {.iterations = static_cast<int>(spec.iterations),
                   .eps = static_cast<float>(spec.eps),
                   .collapses = spec.collapses},
          .streams = spec.streams,
          .count = spec.logits(),
          .tokens = args.in(Op::kLogits).shape[0],
          .logits_TM = args.in(Op::kLogits).template as<float>(),
          .scale = args.in(Op::kScale).template as<float>(),
          .base_M = args.in(Op::kBase).template as<float>()};
}

void stream_weights(const StreamWeights& op, const Args<StreamWeights>& args) {
  using Op = StreamWeights;
  const bool collapses = op.spec().collapses;
  cuda::launch_stream_weights(describe(op.spec(), args), args.out(Op::kPre).as<float>(),
                              collapses ? nullptr : args.out(Op::kPost).as<float>(),
                              collapses ? nullptr : args.out(Op::kComb).as<float>(),
                              cuda::stream_of(args));
}

/// Gradients behind scale and base, and sums of columns.
struct StreamWeightsWorkspace {
  int64_t z = 0;
  int64_t partials = 0;
  int64_t num_bytes = 0;

  explicit StreamWeightsWorkspace(const Shape& logits) {
    WorkspaceLayout layout;
    z = layout.add<float>(logits.num_elements());
    // At least those of the three scales.
    partials = layout.add<std::byte>(cuda::column_sums_bytes(std::max<int64_t>(logits[1], 3)));
    num_bytes = layout.num_bytes();
  }
};

void stream_weights_backward(const StreamWeightsBackward& op,
                             const Args<StreamWeightsBackward>& args) {
  using Op = StreamWeightsBackward;
  const bool collapses = op.spec().collapses;
  const StreamWeightsWorkspace layout(args.in(Op::kLogits).shape);
  cuda::launch_stream_weights_backward(
      describe(op.spec(), args),
      {.pre = args.in(Op::kGradPre).as<float>(),
       .post = collapses ? nullptr : args.in(Op::kGradPost).as<float>(),
       .comb = collapses ? nullptr : args.in(Op::kGradComb).as<float>(),
       .logits_TM = args.out(Op::kGradLogits).as<float>(),
       .z_TM = workspace_part<float>(args.workspace, layout.z),
       .scale = cuda::accumulator_of(args, args.out(Op::kGradScale)),
       .base = cuda::accumulator_of(args, args.out(Op::kGradBase)),
       .partials = workspace_part<float>(args.workspace, layout.partials),
       .num_sms = cuda::context_of(args).num_sms()},
      cuda::stream_of(args));
}

int64_t stream_weights_backward_workspace(const StreamWeightsBackward& /*op*/,
                                          std::span<const ValueType> inputs) {
  return StreamWeightsWorkspace(inputs[StreamWeightsBackward::kLogits].shape).num_bytes;
}

}  // namespace

void add_stream_weights_cuda(KernelTable& table) {
  add_kernel<StreamWeights>(table, stream_weights);
  add_kernel<StreamWeightsBackward>(
      table, stream_weights_backward,
      {.workspace = stream_weights_backward_workspace, .sets_accumulators = true});
}

}  // namespace tessera
