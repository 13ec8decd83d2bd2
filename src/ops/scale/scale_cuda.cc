#include "ops/cuda/row_args.h"
#include "ops/scale/scale.h"
#include "ops/scale/scale_kernels.h"

namespace tessera {
namespace {

void scale(const Scale& op, const Args<Scale>& args) {
  const Tensor& x = args.in(Scale::kX);
  const int64_t width = cuda::width_of_elements(x, args.in_extent(Scale::kX) != nullptr);
  cuda::launch_scale({.dtype = x.dtype,
                      .rows = cuda::rows_of(args, Scale::kX, width),
                      .width = width,
                      .factor = op.factor(),
                      .x = x.data,
                      .addend = op.has_addend() ? args.in(Scale::kAddend).data : nullptr,
                      .y = args.out(Scale::kY).data},
                     cuda::stream_of(args));
}

}  // namespace

void add_scale_cuda(KernelTable& table) {
  add_kernel<Scale>(table, scale, {.workspace = cuda::no_workspace_first_ragged});
}

}  // namespace tessera
