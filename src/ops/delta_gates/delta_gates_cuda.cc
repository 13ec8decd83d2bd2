#include "ops/cuda/row_args.h"
#include "ops/delta_gates/delta_gates.h"
#include "ops/delta_gates/delta_gates_kernels.h"

namespace tessera {
namespace {

template <typename Op>
cuda::DeltaGateRows describe(const Args<Op>& args) {
  const Tensor& a = args.in(Op::kA);
  return {.dtype = a.dtype,
          .tokens = a.shape[0],
          .heads = a.shape[1],
          .a = a.data,
          .b = args.in(Op::kB).data,
          .log_decay = args.in(Op::kLogDecay).template as<float>(),
          .bias = args.in(Op::kBias).template as<float>()};
}

void delta_gates(const DeltaGates& /*op*/, const Args<DeltaGates>& args) {
  using Op = DeltaGates;
  cuda::launch_delta_gates(describe(args), args.out(Op::kDecay).as<float>(),
                           args.out(Op::kBeta).as<float>(), cuda::stream_of(args));
}

void delta_gates_backward(const DeltaGatesBackward& /*op*/, const Args<DeltaGatesBackward>& args) {
  using Op = DeltaGatesBackward;
  cuda::launch_delta_gates_backward(
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

int64_t backward_workspace(const DeltaGatesBackward& /*op*/, std::span<const ValueType> inputs) {
  return cuda::column_sums_bytes(inputs[DeltaGatesBackward::kA].shape[1]);
}

}  // namespace

void add_delta_gates_cuda(KernelTable& table) {
  add_kernel<DeltaGates>(table, delta_gates);
  add_kernel<DeltaGatesBackward>(table, delta_gates_backward,
                                 {.workspace = backward_workspace, .sets_accumulators = true});
}

}  // namespace tessera
