#include <algorithm>

#include "ops/cuda/row_args.h"
#include "ops/stream_logits/stream_logits.h"
#include "ops/stream_logits/stream_logits_kernels.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

using namespace cuda;

RouterShape shape_of(DType dtype, const Shape& x, const Shape& weight) {
  return {.num_tokens = x[0], .hidden_size = x[1], .num_experts = weight[0], .dtype = dtype};
}

template <typename Op>
StreamRows describe(const Args<Op>& args) {
  const Tensor& x = args.in(Op::kX);
  return {.shape = shape_of(x.dtype, x.shape, args.in(Op::kWeight).shape), .x_TW = x.data};
}

void stream_logits(const StreamLogits& op, const Args<StreamLogits>& args) {
  using Op = StreamLogits;
  launch_stream_logits(describe(args), args.in(Op::kWeight).as<float>(), op.eps(),
                       args.out(Op::kLogits).as<float>(), args.out(Op::kRstd).as<float>(),
                       stream_of(args));
}

/// Whether one pass over the rows makes both gradients.
bool is_fused(const RouterShape& s) {
  return s.num_experts <= kFusedStreamLogits && s.num_tokens > 0;
}

struct StreamGradWorkspace {
  int num_splits = 0;
  int64_t scaled = 0;
  int64_t pulls = 0;
  int64_t partials = 0;
  int64_t num_bytes = 0;

  explicit StreamGradWorkspace(const RouterShape& s)
      : num_splits(is_fused(s) ? stream_grad_splits(s) : router_weight_splits(s)) {
    WorkspaceLayout layout;
    scaled = layout.add<float>(s.num_tokens * s.num_experts);
    pulls = layout.add<float>(s.num_tokens);
    partials = layout.add<float>(num_splits * s.num_experts * s.hidden_size);
    num_bytes = layout.num_bytes();
  }
};

void stream_logits_backward(const StreamLogitsBackward& op,
                            const Args<StreamLogitsBackward>& args) {
  using Op = StreamLogitsBackward;
  const StreamRows rows = describe(args);
  const StreamGradWorkspace layout(rows.shape);
  const cudaStream_t stream = stream_of(args);
  auto* scaled = workspace_part<float>(args.workspace, layout.scaled);
  auto* partials = workspace_part<float>(args.workspace, layout.partials);
  const Accumulator grad_weight = accumulator_of(args, args.out(Op::kGradWeight));
  const StreamInputGrads grads = {.rows = rows,
                                  .weight_MW = args.in(Op::kWeight).as<float>(),
                                  .scaled_TM = scaled,
                                  .pulls_T = workspace_part<float>(args.workspace, layout.pulls),
                                  .addend_TW = op.addend() ? args.in(Op::kAddend).data : nullptr,
                                  .grad_TW = args.out(Op::kGradX).data};
  launch_stream_logit_factors({.shape = rows.shape,
                               .logits_TM = args.in(Op::kLogits).as<float>(),
                               .rstd_T = args.in(Op::kRstd).as<float>(),
                               .grad_TM = args.in(Op::kGrad).as<float>(),
                               .scaled_TM = scaled,
                               .pulls_T = workspace_part<float>(args.workspace, layout.pulls)},
                              stream);
  if (is_fused(rows.shape)) {
    launch_fused_stream_grads(grads, partials, stream);
    return launch_add_splits(rows.shape, partials, layout.num_splits, grad_weight, stream);
  }
  launch_router_product_grads({.shape = rows.shape,
                               .grad_logits_TE = scaled,
                               .x = rows.x_TW,
                               .weight = grads.weight_MW,
                               .partials = partials,
                               .addend = nullptr,
                               .grad_x = nullptr,
                               .grad_weight_EH = grad_weight},
                              stream);
  launch_stream_input_grads(grads, stream);
}

int64_t stream_logits_backward_workspace(const StreamLogitsBackward& /*op*/,
                                         std::span<const ValueType> inputs) {
  using Op = StreamLogitsBackward;
  return StreamGradWorkspace(
             shape_of(inputs[Op::kX].dtype, inputs[Op::kX].shape, inputs[Op::kWeight].shape))
      .num_bytes;
}

}  // namespace

void add_stream_logits_cuda(KernelTable& table) {
  add_kernel<StreamLogits>(table, stream_logits);
  add_kernel<StreamLogitsBackward>(
      table, stream_logits_backward,
      {.workspace = stream_logits_backward_workspace, .sets_accumulators = true});
}

}  // namespace tessera
