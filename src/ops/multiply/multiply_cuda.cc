#include "ops/cuda/row_args.h"
#include "ops/multiply/multiply.h"
#include "ops/multiply/multiply_kernels.h"

namespace tessera {
namespace {

void multiply(const Multiply& /*op*/, const Args<Multiply>& args) {
  const Tensor& a = args.in(Multiply::kA);
  const int64_t width = cuda::width_of_elements(a, args.in_extent(Multiply::kA) != nullptr);
  cuda::launch_multiply({.dtype = a.dtype,
                         .rows = cuda::rows_of(args, Multiply::kA, width),
                         .width = width,
                         .a = a.data,
                         .b = args.in(Multiply::kB).data,
                         .y = args.out(Multiply::kY).data},
                        cuda::stream_of(args));
}

}  // namespace

void add_multiply_cuda(KernelTable& table) {
  add_kernel<Multiply>(table, multiply, {.workspace = cuda::no_workspace_first_ragged});
}

}  // namespace tessera
