#include "ops/cuda/context.h"
#include "ops/mix_streams/mix_streams.h"
#include "ops/mix_streams/mix_streams_kernels.h"

namespace tessera {
namespace {

template <typename Op>
cuda::MixCall describe(const Args<Op>& args) {
  const Tensor& x = args.in(Op::kX);
  const int64_t streams = args.in(Op::kPost).shape[1];
  return {.dtype = x.dtype,
          .tokens = x.shape[0],
          .streams = streams,
          .hidden = x.shape[1] / streams,
          .x = x.data,
          .given = args.in(Op::kGiven).data,
          .post = args.in(Op::kPost).template as<float>(),
          .comb = args.in(Op::kComb).template as<float>()};
}

void mix_streams(const MixStreams& /*op*/, const Args<MixStreams>& args) {
  cuda::launch_mix_streams(describe(args), args.out(MixStreams::kY).data, cuda::stream_of(args));
}

void mix_streams_backward(const MixStreamsBackward& /*op*/, const Args<MixStreamsBackward>& args) {
  using Op = MixStreamsBackward;
  cuda::launch_mix_streams_backward(describe(args),
                                    {.grad = args.in(Op::kGrad).data,
                                     .x = args.out(Op::kGradX).data,
                                     .given = args.out(Op::kGradGiven).data,
                                     .post = args.out(Op::kGradPost).as<float>(),
                                     .comb = args.out(Op::kGradComb).as<float>()},
                                    cuda::stream_of(args));
}

}  // namespace

void add_mix_streams_cuda(KernelTable& table) {
  add_kernel<MixStreams>(table, mix_streams);
  add_kernel<MixStreamsBackward>(table, mix_streams_backward);
}

}  // namespace tessera
