#include "ops/cuda/row_args.h"
#include "ops/gated_norm/gated_norm.h"
#include "ops/gated_norm/gated_norm_kernels.h"

namespace tessera {
namespace {

template <typename Op>
cuda::GatedNormRows describe(const Op& op, const Args<Op>& args) {
  const Tensor& x = args.in(Op::kX);
  const Tensor& weight = args.in(Op::kWeight);
  return {.dtype = x.dtype,
          .rows = x.num_elements() / weight.shape[0],
          .size = weight.shape[0],
          .eps = op.eps(),
          .x = x.data,
          .z = args.in(Op::kZ).data,
          .weight = weight.template as<float>(),
          .num_sms = cuda::context_of(args).num_sms(),
          .sigmoid = op.gate() == NormGate::kSigmoid};
}

void gated_norm(const GatedNorm& op, const Args<GatedNorm>& args) {
  cuda::launch_gated_norm(describe(op, args), args.out(GatedNorm::kY).data, cuda::stream_of(args));
}

void gated_norm_backward(const GatedNormBackward& op, const Args<GatedNormBackward>& args) {
  using Op = GatedNormBackward;
  cuda::launch_gated_norm_backward(describe(op, args),
                                   {.y = args.in(Op::kGrad).data,
                                    .x = args.out(Op::kGradX).data,
                                    .z = args.out(Op::kGradZ).data,
                                    .weight = cuda::accumulator_of(args, args.out(Op::kGradWeight)),
                                    .scratch = reinterpret_cast<float*>(args.workspace.data())},
                                   cuda::stream_of(args));
}

int64_t backward_workspace(const GatedNormBackward& /*op*/, std::span<const ValueType> inputs) {
  const int64_t size = inputs[GatedNormBackward::kWeight].shape[0];
  const int64_t rows = inputs[GatedNormBackward::kX].shape.num_elements() / size;
  return cuda::gated_norm_backward_bytes(rows, size);
}

}  // namespace

void add_gated_norm_cuda(KernelTable& table) {
  add_kernel<GatedNorm>(table, gated_norm);
  add_kernel<GatedNormBackward>(table, gated_norm_backward,
                                {.workspace = backward_workspace, .sets_accumulators = true});
}

}  // namespace tessera
