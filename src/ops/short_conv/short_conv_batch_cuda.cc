#include "ops/cuda/row_args.h"
#include "ops/short_conv/short_conv_batch.h"
#include "ops/short_conv/short_conv_batch_kernels.h"

namespace tessera {
namespace {

void short_conv_batch(const ShortConvBatch& op, const Args<ShortConvBatch>& args) {
  using Op = ShortConvBatch;
  const Tensor& x = args.in(Op::kX);
  const Tensor& weight = args.in(Op::kWeight);
  const Tensor& lengths = args.in(Op::kLengths);
  cuda::launch_short_conv_batch({.dtype = x.dtype,
                                 .tokens = x.shape[0],
                                 .channels = x.shape[1],
                                 .taps = static_cast<int>(weight.shape[1]),
                                 .x = x.data,
                                 .weight = weight.as<float>(),
                                 .bias = op.biased() ? args.in(Op::kBias).as<float>() : nullptr,
                                 .bounds = args.in(Op::kCuSeqlens).as<int32_t>(),
                                 .lengths = lengths.as<int32_t>(),
                                 .slots = args.in(Op::kSlots).as<int32_t>(),
                                 .num_sequences = static_cast<int>(lengths.shape[0]),
                                 .num_slots = static_cast<int>(op.num_slots()),
                                 .silu = op.silu(),
                                 .y = args.out(Op::kY).data,
                                 .states = args.out(Op::kState).data},
                                cuda::stream_of(args));
}

}  // namespace

void add_short_conv_batch_cuda(KernelTable& table) {
  add_kernel<ShortConvBatch>(table, short_conv_batch);
}

}  // namespace tessera
