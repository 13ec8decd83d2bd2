#include "ops/cuda/row_args.h"
#include "ops/kda_gates/kda_gates.h"
#include "ops/kda_gates/kda_gates_kernels.h"

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

void kda_gates_backward(const KdaGatesBackward& /*op*/, const Args<KdaGatesBackward>& args) {
  using Op = KdaGatesBackward;
  cuda::launch_kda_gates_backward(
      describe(args),
      {.decay = args.in(Op::kGradDecay).as<float>(),
       .beta = args.in(Op::kGradBeta).as<float>(),
       .a = args.out(Op::kGradA).data,
       .b = args.out(Op::kGradB).data,
       .log_decay = cuda::accumulator_of(args, args.out(Op::kGradLogDecay)),
       .bias = cuda::accumulator_of(args, args.out(Op::kGradBias)),
       .partials = reinterpret_cast<float*>(args.workspace.data()),
       .num_sms = cuda::context_of(args).num_sms()},
      cuda::stream_of(args));
}

int64_t backward_workspace(const KdaGatesBackward& /*op*/, std::span<const ValueType> inputs) {
  return cuda::column_sums_bytes(inputs[KdaGatesBackward::kA].shape[1]);
}

}  // namespace

void add_kda_gates_cuda(KernelTable& table) {
  add_kernel<KdaGates>(table, kda_gates);
  add_kernel<KdaGatesBackward>(table, kda_gates_backward,
                               {.workspace = backward_workspace, .sets_accumulators = true});
}

}  // namespace tessera
