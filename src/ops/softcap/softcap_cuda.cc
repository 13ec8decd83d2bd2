#include "ops/cuda/row_args.h"
#include "ops/softcap/softcap.h"
#include "ops/softcap/softcap_kernels.h"

namespace tessera {
namespace {

void softcap(const Softcap& op, const Args<Softcap>& args) {
  const Tensor& x = args.in(Softcap::kX);
  const int64_t width = cuda::width_of_elements(x, args.in_extent(Softcap::kX) != nullptr);
  cuda::launch_softcap({.dtype = x.dtype,
                        .rows = cuda::rows_of(args, Softcap::kX, width),
                        .width = width,
                        .cap = op.cap(),
                        .x = x.data,
                        .y = args.out(Softcap::kY).data},
                       cuda::stream_of(args));
}

}  // namespace

void add_softcap_cuda(KernelTable& table) {
  add_kernel<Softcap>(table, softcap, {.workspace = cuda::no_workspace_first_ragged});
}

}  // namespace tessera
