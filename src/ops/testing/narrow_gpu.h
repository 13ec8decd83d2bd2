#pragma once

#include "ops/cuda/context.h"
#include "ops/registry/cuda_kernels.h"
#include "runtime/cuda/cuda_device.h"

namespace tessera::testing {

/// The first GPU, whose kernels are told that it has one multiprocessor: blocks that take work in
/// turn take several pieces of it even of a tiny shape.
inline Backend make_narrow_gpu() {
  auto device = std::make_shared<cuda::CudaDevice>(0);
  auto context = std::make_shared<cuda::CudaContext>(device->stream(), 1);
  return {std::move(device), std::move(context), make_cuda_kernels()};
}

}  // namespace tessera::testing
