#include "ops/cuda/context.h"
#include "ops/quantize/quantize.h"
#include "ops/quantize/quantize_kernels.h"

namespace tessera {
namespace {

void quantize(const Quantize& op, const Args<Quantize>& args) {
  const Tensor& x = args.in(Quantize::kX);
  const Tensor& y = args.out(Quantize::kY);
  if (x.num_elements() == 0) return;
  cuda::launch_quantize({.dtype = x.dtype,
                         .element = y.dtype,
                         .x = x.data,
                         .y = y.data,
                         .scales = scales_of(y).as<float>(),
                         .num_rows = x.shape[0],
                         .num_columns = x.shape[1],
                         .block_rows = op.block_rows(),
                         .block_columns = op.block_columns(x.shape[1]),
                         .smallest_amax = Quantize::kSmallestAmax,
                         .extent = args.in_extent(Quantize::kX)},
                        cuda::stream_of(args));
}

}  // namespace

void add_quantize_cuda(KernelTable& table) {
  add_kernel<Quantize>(table, quantize, {.takes = takes_fp8});
}

}  // namespace tessera
