#include "ops/cuda/context.h"
#include "ops/quantize/quantize_blocks.h"
#include "ops/quantize/quantize_kernels.h"

namespace tessera {
namespace {

void quantize_blocks(const QuantizeBlocks& /*op*/, const Args<QuantizeBlocks>& args) {
  const Tensor& x = args.in(QuantizeBlocks::kX);
  if (x.num_elements() == 0) return;
  cuda::launch_quantize({.dtype = x.dtype,
                         .element = DType::kE4M3,
                         .x = x.data,
                         .y = args.out(QuantizeBlocks::kY).data,
                         .scales = args.out(QuantizeBlocks::kScales).as<float>(),
                         .num_rows = x.shape[0],
                         .num_columns = x.shape[1],
                         .block_rows = QuantizeBlocks::kBlock,
                         .block_columns = QuantizeBlocks::kBlock,
                         .extent = nullptr},
                        cuda::stream_of(args));
}

}  // namespace

void add_quantize_blocks_cuda(KernelTable& table) {
  add_kernel<QuantizeBlocks>(table, quantize_blocks);
}

}  // namespace tessera
