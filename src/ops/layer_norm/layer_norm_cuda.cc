#include "ops/cuda/column_sums.h"
#include "ops/cuda/row_args.h"
#include "ops/layer_norm/layer_norm.h"
#include "ops/layer_norm/layer_norm_kernels.h"

namespace tessera {
namespace {

template <typename Op>
cuda::LayerNormRows rows_of(const Op& op, const Args<Op>& args) {
  const Tensor& x = args.in(Op::kX);
  return {.dtype = x.dtype,
          .rows = cuda::rows_of(args, Op::kX, x.shape[1]),
          .size = x.shape[1],
          .eps = op.eps(),
          .x = x.data,
          .weight = args.in(Op::kWeight).template as<float>()};
}

void layer_norm(const LayerNorm& op, const Args<LayerNorm>& args) {
  cuda::launch_layer_norm(rows_of(op, args), args.in(LayerNorm::kBias).as<float>(),
                          args.out(LayerNorm::kY).data, cuda::stream_of(args));
}

void layer_norm_backward(const LayerNormBackward& op, const Args<LayerNormBackward>& args) {
  using Op = LayerNormBackward;
  cuda::launch_layer_norm_backward(
      rows_of(op, args),
      {.grad = args.in(Op::kGrad).data,
       .addend = op.addend() ? args.in(Op::kAddend).data : nullptr,
       .grad_x = args.out(Op::kGradX).data,
       .grad_weight = cuda::accumulator_of(args, args.out(Op::kGradWeight)),
       .grad_bias = cuda::accumulator_of(args, args.out(Op::kGradBias)),
       .scratch = args.workspace.data(),
       .num_sms = cuda::context_of(args).num_sms()},
      cuda::stream_of(args));
}

int64_t backward_workspace(const LayerNormBackward& /*op*/, std::span<const ValueType> inputs) {
  const Shape& x = inputs[LayerNormBackward::kX].shape;
  return cuda::layer_norm_statistics_bytes(x[0]) + cuda::column_sums_bytes(x[1]);
}

}  // namespace

void add_layer_norm_cuda(KernelTable& table) {
  add_kernel<LayerNorm>(table, layer_norm);
  add_kernel<LayerNormBackward>(table, layer_norm_backward,
                                {.workspace = backward_workspace, .sets_accumulators = true});
}

}  // namespace tessera
