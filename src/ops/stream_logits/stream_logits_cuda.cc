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
  const StreamRows rows = describe(args);
  float* logits = args.out(Op::kLogits).as<float>();
  launch_router_logits({.shape = rows.shape,
                        .x = rows.x_TW,
                        .weight = args.in(Op::kWeight).as<float>(),
                        .logits_TE = logits},
                       stream_of(args));
  launch_norm_stream_logits(rows, op.eps(), logits, args.out(Op::kRstd).as<float>(),
                            stream_of(args));
}

struct StreamGradWorkspace {
  int64_t scaled = 0;
  int64_t pulls = 0;
  int64_t partials = 0;
  int64_t num_bytes = 0;

  explicit StreamGradWorkspace(const RouterShape& s) {
    WorkspaceLayout layout;
    scaled = layout.add<float>(s.num_tokens * s.num_experts);
    pulls = layout.add<float>(s.num_tokens);
    partials = layout.add<float>(router_weight_splits(s) * s.num_experts * s.hidden_size);
    num_bytes = layout.num_bytes();
  }
};

void stream_logits_backward(const StreamLogitsBackward& op,
                            const Args<StreamLogitsBackward>& args) {
  using Op = StreamLogitsBackward;
  const StreamRows rows = describe(args);
  const StreamGradWorkspace layout(rows.shape);
  auto* scaled = workspace_part<float>(args.workspace, layout.scaled);
  auto* pulls = workspace_part<float>(args.workspace, layout.pulls);
  const auto* weight = args.in(Op::kWeight).as<float>();
  launch_stream_logit_factors({.shape = rows.shape,
                               .logits_TM = args.in(Op::kLogits).as<float>(),
                               .rstd_T = args.in(Op::kRstd).as<float>(),
                               .grad_TM = args.in(Op::kGrad).as<float>(),
                               .scaled_TM = scaled,
                               .pulls_T = pulls},
                              stream_of(args));
  launch_router_product_grads({.shape = rows.shape,
                               .grad_logits_TE = scaled,
                               .x = rows.x_TW,
                               .weight = weight,
                               .partials = workspace_part<float>(args.workspace, layout.partials),
                               .addend = nullptr,
                               .grad_x = nullptr,
                               .grad_weight_EH = accumulator_of(args, args.out(Op::kGradWeight))},
                              stream_of(args));
  launch_stream_input_grads({.rows = rows,
                             .weight_MW = weight,
                             .scaled_TM = scaled,
                             .pulls_T = pulls,
                             .addend_TW = op.addend() ? args.in(Op::kAddend).data : nullptr,
                             .grad_TW = args.out(Op::kGradX).data},
                            stream_of(args));
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
