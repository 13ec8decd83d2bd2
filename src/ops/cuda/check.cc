#include "ops/cuda/check.h"

#include "core/error.h"

namespace tessera::cuda {

void check(cudaError_t status) {
  ensure(status == cudaSuccess, "CUDA: {} ({})", cudaGetErrorString(status),
         cudaGetErrorName(status));
}

}  // namespace tessera::cuda
