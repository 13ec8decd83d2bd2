#include "ops/cuda/row_args.h"
#include "ops/short_conv/short_conv.h"
#include "ops/short_conv/short_conv_kernels.h"

namespace tessera {
namespace {

template <typename Op>
cuda::ConvRows describe(const Op& op, const Args<Op>& args) {
  const Tensor& x = args.in(Op::kX);
  const Tensor& weight = args.in(Op::kWeight);
  const int64_t first = op.spec().first_channel;
  return {.dtype = x.dtype,
          .tokens = x.shape[0],
          .channels = x.shape[1],
          .taps = static_cast<int>(weight.shape[1]),
          .x = x.data,
          .weight = weight.template as<float>() + first * weight.shape[1],
          .bias = op.biased() ? args.in(Op::kBias).template as<float>() + first : nullptr,
          .silu = op.silu()};
}

template <typename Op>
cuda::ConvSequences sequences_of(const Args<Op>& args) {
  const Tensor& bounds = args.in(Op::kCuSeqlens);
  return {.bounds = bounds.template as<int32_t>(), .count = static_cast<int>(bounds.shape[0] - 1)};
}

void short_conv(const ShortConv& op, const Args<ShortConv>& args) {
  cuda::launch_short_conv(describe(op, args), sequences_of(args), args.out(ShortConv::kY).data,
                          cuda::stream_of(args));
}

void short_conv_backward(const ShortConvBackward& op, const Args<ShortConvBackward>& args) {
  using Op = ShortConvBackward;
  const cuda::ConvRows call = describe(op, args);
  auto* const partials = reinterpret_cast<float*>(args.workspace.data());
  const IndexRange channels{op.spec().first_channel, call.channels};
  cuda::Accumulator bias;
  if (op.biased()) bias = cuda::accumulator_of_rows(args, args.out(Op::kGradBias), channels);
  cuda::launch_short_conv_backward(
      call, sequences_of(args),
      {.y = args.in(Op::kGrad).data,
       .x = args.out(Op::kGradX).data,
       .weight = cuda::accumulator_of_rows(args, args.out(Op::kGradWeight), channels),
       .bias = bias,
       .partials = partials,
       .bias_partials = partials + cuda::conv_parts(call.tokens) * call.channels * call.taps},
      cuda::stream_of(args));
}

void short_conv_cached(const ShortConvCached& op, const Args<ShortConvCached>& args) {
  using Op = ShortConvCached;
  cuda::launch_short_conv_cached(describe(op, args), args.in(Op::kStart).as<int32_t>(),
                                 args.out(Op::kY).data, args.out(Op::kState).data,
                                 cuda::stream_of(args));
}

int64_t backward_workspace(const ShortConvBackward& op, std::span<const ValueType> inputs) {
  const Shape& x = inputs[ShortConvBackward::kX].shape;
  const int64_t of_channel = inputs[ShortConvBackward::kWeight].shape[1] + (op.biased() ? 1 : 0);
  return cuda::conv_parts(x[0]) * x[1] * of_channel * dtype_size(DType::kF32);
}

}  // namespace

void add_short_conv_cuda(KernelTable& table) {
  add_kernel<ShortConv>(table, short_conv);
  add_kernel<ShortConvBackward>(table, short_conv_backward,
                                {.workspace = backward_workspace, .sets_accumulators = true});
  add_kernel<ShortConvCached>(table, short_conv_cached);
}

}  // namespace tessera
