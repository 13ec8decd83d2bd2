#include "ops/collapse_streams/collapse_streams.h"
#include "ops/collapse_streams/collapse_streams_kernels.h"
#include "ops/cuda/context.h"

namespace tessera {
namespace {

template <typename Op>
cuda::CollapseCall describe(const Args<Op>& args) {
  const Tensor& x = args.in(Op::kX);
  const int64_t streams = args.in(Op::kPre).shape[1];
  return {.dtype = x.dtype,
          .tokens = x.shape[0],
          .streams = streams,
          .hidden = x.shape[1] / streams,
          .x = x.data,
          .pre = args.in(Op::kPre).template as<float>()};
}

void collapse_streams(const CollapseStreams& /*op*/, const Args<CollapseStreams>& args) {
  cuda::launch_collapse_streams(describe(args), args.out(CollapseStreams::kY).data,
                                cuda::stream_of(args));
}

void collapse_streams_backward(const CollapseStreamsBackward& op,
                               const Args<CollapseStreamsBackward>& args) {
  using Op = CollapseStreamsBackward;
  cuda::launch_collapse_streams_backward(
      describe(args), args.in(Op::kGrad).data, op.addend() ? args.in(Op::kAddend).data : nullptr,
      args.out(Op::kGradX).data, args.out(Op::kGradPre).as<float>(), cuda::stream_of(args));
}

}  // namespace

void add_collapse_streams_cuda(KernelTable& table) {
  add_kernel<CollapseStreams>(table, collapse_streams);
  add_kernel<CollapseStreamsBackward>(table, collapse_streams_backward);
}

}  // namespace tessera
