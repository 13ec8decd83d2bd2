#include "ops/registry/cuda_kernels.h"

#include "ops/grouped_matmul/grouped_matmul_cuda.h"

namespace tessera {

KernelTable make_cuda_kernels() {
  KernelTable table;
  add_grouped_matmul_cuda(table);
  return table;
}

}  // namespace tessera
