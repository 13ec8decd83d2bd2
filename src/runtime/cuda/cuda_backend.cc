#include "runtime/cuda/cuda_backend.h"
#include "ops/cuda/check.h"
#include "ops/cuda/context.h"
#include "ops/registry/cuda_kernels.h"
#include "runtime/cuda/cuda_device.h"

namespace tessera {
namespace {

constexpr int kHopper = 9;

GpuInfo describe(int index) {
  cudaDeviceProp properties{};
  cuda::check(cudaGetDeviceProperties(&properties, index));
  return {.name = properties.name,
          .memory = static_cast<int64_t>(properties.totalGlobalMem),
          .compute_major = properties.major,
          .compute_minor = properties.minor};
}

}  // namespace

bool built_with_cuda() {
  return true;
}

GpuList list_gpus() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    return {.gpus = {}, .why = cudaGetErrorString(status)};
  }
  GpuList list;
  for (int index = 0; index < count; ++index) list.gpus.push_back(describe(index));
  if (list.gpus.empty()) list.why = "the driver lists none";
  return list;
}

Backend make_cuda_backend(int index) {
  const GpuList list = list_gpus();
  require(!list.gpus.empty(), "there is no GPU that can be used: {}; run.device = \"cpu\" works",
          list.why);
  require(index >= 0 && index < std::ssize(list.gpus), "there is no GPU {}: {} can be seen", index,
          list.gpus.size());
  const GpuInfo& gpu = list.gpus[static_cast<size_t>(index)];
  require(
      gpu.compute_major == kHopper,
      "GPU {} is a {} of compute capability {}.{}; the kernels need a Hopper GPU (9.0): an H100, "
      "H200 or GH200",
      index, gpu.name, gpu.compute_major, gpu.compute_minor);
  auto device = std::make_shared<cuda::CudaDevice>(index);
  int num_sms = 0;
  cuda::check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, index));
  auto context = std::make_shared<cuda::CudaContext>(index, device->stream(), num_sms);
  return {std::move(device), std::move(context), make_cuda_kernels()};
}

}  // namespace tessera
