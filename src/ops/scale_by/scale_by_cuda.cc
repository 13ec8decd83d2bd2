#include "ops/cuda/row_args.h"
#include "ops/scale_by/scale_by.h"
#include "ops/scale_by/scale_by_kernels.h"

namespace tessera {
namespace {

void scale_by(const ScaleBy& /*op*/, const Args<ScaleBy>& args) {
  const Tensor& x = args.in(ScaleBy::kX);
  const int64_t width = cuda::width_of_elements(x, args.in_extent(ScaleBy::kX) != nullptr);
  cuda::launch_scale_by({.dtype = x.dtype,
                         .rows = cuda::rows_of(args, ScaleBy::kX, width),
                         .width = width,
                         .factor = args.in(ScaleBy::kFactor).as<float>(),
                         .x = x.data,
                         .y = args.out(ScaleBy::kY).data},
                        cuda::stream_of(args));
}

}  // namespace

void add_scale_by_cuda(KernelTable& table) {
  add_kernel<ScaleBy>(table, scale_by, {.workspace = cuda::no_workspace_first_ragged});
}

}  // namespace tessera
