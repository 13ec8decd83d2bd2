#include "ops/cuda/limits.h"
#include "ops/cuda/row_args.h"
#include "ops/gated_norm/gated_group_norm.h"
#include "ops/gated_norm/gated_group_norm_kernels.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

template <typename Op>
cuda::GroupNormRows describe_groups(const Op& op, const Args<Op>& args) {
  const Tensor& x = args.in(Op::kX);
  return {.dtype = x.dtype,
          .tokens = x.shape[0],
          .groups = op.spec().num_groups,
          .size = x.shape[1] / op.spec().num_groups,
          .eps = static_cast<float>(op.spec().eps),
          .x = x.data,
          .z = args.in(Op::kZ).data,
          .weight = args.in(Op::kWeight).template as<float>()};
}

struct PlacedGroupNorm {
  float* deviations = nullptr;
  float* partials = nullptr;
  int64_t num_bytes = 0;
};

PlacedGroupNorm place_group_norm(int64_t rows, int64_t width, std::span<std::byte> memory) {
  WorkspaceLayout layout;
  PlacedGroupNorm placed;
  placed.deviations = workspace_part<float>(memory, layout.add<float>(rows));
  placed.partials =
      workspace_part<float>(memory, layout.add<std::byte>(cuda::column_sums_bytes(width)));
  placed.num_bytes = layout.num_bytes();
  return placed;
}

void gated_group_norm(const GatedGroupNorm& op, const Args<GatedGroupNorm>& args) {
  cuda::launch_gated_group_norm(describe_groups(op, args), args.out(GatedGroupNorm::kY).data,
                                cuda::stream_of(args));
}

void gated_group_norm_backward(const GatedGroupNormBackward& op,
                               const Args<GatedGroupNormBackward>& args) {
  using Op = GatedGroupNormBackward;
  const cuda::GroupNormRows call = describe_groups(op, args);
  const PlacedGroupNorm placed =
      place_group_norm(call.tokens * call.groups, call.groups * call.size, args.workspace);
  cuda::launch_gated_group_norm_backward(
      call,
      {.y = args.in(Op::kGrad).data,
       .x = args.out(Op::kGradX).data,
       .z = args.out(Op::kGradZ).data,
       .weight = cuda::accumulator_of(args, args.out(Op::kGradWeight)),
       .deviations = placed.deviations,
       .partials = placed.partials,
       .num_sms = cuda::context_of(args).num_sms()},
      cuda::stream_of(args));
}

void check_rows(const Operator& op, const GroupNormSpec& spec, std::span<const ValueType> inputs) {
  cuda::check_limit(op, inputs[GatedGroupNorm::kX].shape[0] * spec.num_groups, INT32_MAX,
                    "groups of tokens");
}

int64_t forward_workspace(const GatedGroupNorm& op, std::span<const ValueType> inputs) {
  check_rows(op, op.spec(), inputs);
  return 0;
}

int64_t group_backward_workspace(const GatedGroupNormBackward& op,
                                 std::span<const ValueType> inputs) {
  check_rows(op, op.spec(), inputs);
  const Shape& x = inputs[GatedGroupNorm::kX].shape;
  return place_group_norm(x[0] * op.spec().num_groups, x[1], {}).num_bytes;
}

}  // namespace

void add_gated_group_norm_cuda(KernelTable& table) {
  add_kernel<GatedGroupNorm>(table, gated_group_norm, {.workspace = forward_workspace});
  add_kernel<GatedGroupNormBackward>(
      table, gated_group_norm_backward,
      {.workspace = group_backward_workspace, .sets_accumulators = true});
}

}  // namespace tessera
