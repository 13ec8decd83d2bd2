#include "ops/cuda/row_args.h"
#include "ops/kda_gates/kda_gates.h"
#include "ops/kda_gates/kda_gates_kernels.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

template <typename Op>
cuda::KdaGateRows describe(const Args<Op>& args) {
  const Tensor& b = args.in(Op::kB);
  return {.dtype = b.dtype,
          .tokens = b.shape[0],
          .heads = b.shape[1],
          .size = args.in(Op::kA).shape[1] / b.shape[1],
          .a = args.in(Op::kA).data,
          .b = b.data,
          .log_decay = args.in(Op::kLogDecay).template as<float>(),
          .bias = args.in(Op::kBias).template as<float>()};
}

void kda_gates(const KdaGates& /*op*/, const Args<KdaGates>& args) {
  using Op = KdaGates;
  cuda::launch_kda_gates(describe(args), args.out(Op::kDecay).as<float>(),
                         args.out(Op::kBeta).as<float>(), cuda::stream_of(args));
}

/// Scratch memory for rows of so many decays.
struct GradWorkspace {
  int64_t partials = 0;
  int64_t rates = 0;
  int64_t num_bytes = 0;

  explicit GradWorkspace(int64_t width) {
    WorkspaceLayout layout;
    partials = layout.add<std::byte>(cuda::column_sums_bytes(width));
    rates = layout.add<float>(width);
    num_bytes = layout.num_bytes();
  }
};

void kda_gates_backward(const KdaGatesBackward& /*op*/, const Args<KdaGatesBackward>& args) {
  using Op = KdaGatesBackward;
  const GradWorkspace layout(args.in(Op::kA).shape[1]);
  cuda::launch_kda_gates_backward(
      describe(args),
      {.decay = args.in(Op::kGradDecay).as<float>(),
       .beta = args.in(Op::kGradBeta).as<float>(),
       .a = args.out(Op::kGradA).data,
       .b = args.out(Op::kGradB).data,
       .log_decay = cuda::accumulator_of(args, args.out(Op::kGradLogDecay)),
       .bias = cuda::accumulator_of(args, args.out(Op::kGradBias)),
       .partials = workspace_part<float>(args.workspace, layout.partials),
       .rates = workspace_part<float>(args.workspace, layout.rates),
       .num_sms = cuda::context_of(args).num_sms()},
      cuda::stream_of(args));
}

int64_t backward_workspace(const KdaGatesBackward& /*op*/, std::span<const ValueType> inputs) {
  return GradWorkspace(inputs[KdaGatesBackward::kA].shape[1]).num_bytes;
}

}  // namespace

void add_kda_gates_cuda(KernelTable& table) {
  add_kernel<KdaGates>(table, kda_gates);
  add_kernel<KdaGatesBackward>(table, kda_gates_backward,
                               {.workspace = backward_workspace, .sets_accumulators = true});
}

}  // namespace tessera
