#include "ops/add/add.h"
#include "ops/add/add_kernels.h"
#include "ops/cuda/row_args.h"

namespace tessera {
namespace {

void add(const Add& /*op*/, const Args<Add>& args) {
  const Tensor& a = args.in(Add::kA);
  const int64_t width = cuda::width_of_elements(a, args.in_extent(Add::kA) != nullptr);
  cuda::launch_add({.dtype = a.dtype,
                    .rows = cuda::rows_of(args, Add::kA, width),
                    .width = width,
                    .a = a.data,
                    .b = args.in(Add::kB).data,
                    .sum = args.out(Add::kSum).data},
                   cuda::stream_of(args));
}

}  // namespace

void add_add_cuda(KernelTable& table) {
  add_kernel<Add>(table, add, {.workspace = cuda::no_workspace_first_ragged});
}

}  // namespace tessera
