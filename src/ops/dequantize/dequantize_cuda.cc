#include "core/format.h"
#include "ops/cuda/row_args.h"
#include "ops/dequantize/dequantize.h"
#include "ops/dequantize/dequantize_kernels.h"
#include "ops/scaled_rows.h"

namespace tessera {
namespace {

void dequantize(const Dequantize& /*op*/, const Args<Dequantize>& args) {
  const Tensor& x = args.in(Dequantize::kX);
  if (x.num_elements() == 0) return;
  const int64_t num_columns = x.shape[1];
  cuda::launch_dequantize({.element = x.dtype,
                           .dtype = args.out(Dequantize::kY).dtype,
                           .x = static_cast<const uint8_t*>(x.data),
                           .scales = scales_of(x).as<float>(),
                           .y = args.out(Dequantize::kY).data,
                           .rows = cuda::rows_of(args, Dequantize::kX, num_columns),
                           .num_columns = num_columns,
                           .columns_of_scale = columns_of_scale(x.scale, num_columns),
                           .rows_of_scale = x.scale.rows},
                          cuda::stream_of(args));
}

}  // namespace

void add_dequantize_cuda(KernelTable& table) {
  add_kernel<Dequantize>(table, dequantize, {.takes = takes_dequantized});
}

}  // namespace tessera
