#include "ops/attention_sink/attention_sink.h"
#include "ops/attention_sink/attention_sink_kernels.h"
#include "ops/cuda/context.h"

namespace tessera {
namespace {

template <typename Op>
cuda::SinkRows rows_of(const AttentionSinkSpec& spec, const Args<Op>& args) {
  const Tensor& o = args.in(Op::kO);
  return {.dtype = o.dtype,
          .num_tokens = o.shape[0],
          .num_heads = static_cast<int>(spec.num_heads),
          .head_size = static_cast<int>(o.shape[1] / spec.num_heads),
          .o = o.data,
          .lse = args.in(Op::kLse).template as<float>(),
          .sinks = args.in(Op::kSinks).template as<float>() + spec.first_head};
}

void attention_sink(const AttentionSink& op, const Args<AttentionSink>& args) {
  cuda::launch_attention_sink(rows_of(op.spec(), args), args.out(AttentionSink::kY).data,
                              cuda::stream_of(args));
}

void attention_sink_backward(const AttentionSinkBackward& op,
                             const Args<AttentionSinkBackward>& args) {
  using Op = AttentionSinkBackward;
  const Tensor& sinks = args.out(Op::kGradSinks);
  cuda::launch_attention_sink_backward(
      rows_of(op.spec(), args),
      {.grad = args.in(Op::kGrad).data,
       .grad_o = args.out(Op::kGradO).data,
       .grad_lse = args.out(Op::kGradLse).as<float>(),
       .grad_sinks = sinks ? sinks.as<float>() + op.spec().first_head : nullptr},
      cuda::stream_of(args));
}

}  // namespace

void add_attention_sink_cuda(KernelTable& table) {
  add_kernel<AttentionSink>(table, attention_sink);
  add_kernel<AttentionSinkBackward>(table, attention_sink_backward);
}

}  // namespace tessera
