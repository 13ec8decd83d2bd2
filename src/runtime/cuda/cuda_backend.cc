#include "runtime/cuda/cuda_backend.h"

#include <cstdlib>

#include "ops/cuda/check.h"
#include "ops/cuda/context.h"
#include "ops/registry/cuda_kernels.h"
#include "runtime/cuda/cuda_device.h"
#include "runtime/cuda/cuda_side_stream.h"

namespace tessera {
namespace {

/// Streams that share a queue of the GPU wait for one another; each communicator has a stream.
bool ask_for_queues() {
  return ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0) == 0;
}

uint64_t hash_id(const cudaUUID_t& uuid) {
  constexpr uint64_t kPrime = 1099511628211U;
  uint64_t hash = 14695981039346656037U;
  for (const char byte : uuid.bytes) hash = (hash ^ static_cast<uint8_t>(byte)) * kPrime;
  return hash;
}

GpuInfo describe(int index) {
  cudaDeviceProp properties{};
  cuda::check(cudaGetDeviceProperties(&properties, index));
  return {.name = properties.name,
          .memory = static_cast<int64_t>(properties.totalGlobalMem),
          .compute_major = properties.major,
          .compute_minor = properties.minor,
          .id = hash_id(properties.uuid)};
}

/// Stands for a GPU where programs are only planned.
class PlannedGpu final : public Device {
 public:
  std::string name() const override { return "cuda"; }
  bool is_host() const override { return false; }
  std::byte* allocate(int64_t /*num_bytes*/) override { refuse(); }
  void release(std::byte* /*data*/, int64_t /*num_bytes*/) noexcept override {}
  int64_t page_bytes() const override { return cuda::CudaPages::kBytes; }
  int64_t rows_read_behind() const override { return cuda::CudaDevice::kRowsReadBehind; }
  void copy(void* /*to*/, const void* /*from*/, int64_t /*num_bytes*/) override { refuse(); }
  void zero(void* /*data*/, int64_t /*num_bytes*/) override { refuse(); }
  void synchronize() override { refuse(); }
  Mark mark() override { refuse(); }
  void when_known(Mark /*begin*/, Mark /*end*/, std::function<void(Time, Time)> /*use*/) override {
    refuse();
  }
  int64_t used_bytes() const override { return 0; }

 private:
  [[noreturn]] static void refuse() {
    throw InternalError("a GPU that is only planned for was asked to work");
  }
};

/// Its second line of work, for which memory is planned too.
class PlannedSide final : public SideLane {
 public:
  bool suits(const Cost& cost) const override { return cuda::suits_side_stream(cost); }
  KernelContext* context() const override { return nullptr; }
  void give(const std::function<void()>& /*start*/) override {
    throw InternalError("a GPU that is only planned for was asked to work aside");
  }
  void join() override {}
};

}  // namespace

bool built_with_cuda() {
  return true;
}

GpuList list_gpus() {
  static const bool asked = ask_for_queues();  // before the runtime first looks
  static_cast<void>(asked);
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

std::string gpu_pci_address(int index) {
  std::array<char, 32> address{};
  const auto size = static_cast<int>(address.size());
  if (cudaDeviceGetPCIBusId(address.data(), size, index) == cudaSuccess) return address.data();
  cudaGetLastError();
  return "";
}

void check_gpu(int index) {
  const GpuList list = list_gpus();
  require(
      !list.gpus.empty(),
      "there is no GPU that can be used: {}; the CPU can: run.device = \"cpu\", or --device=cpu "
      "of eval and generate",
      list.why);
  require(index >= 0 && index < std::ssize(list.gpus), "there is no GPU {}: {} can be seen", index,
          list.gpus.size());
  const GpuInfo& gpu = list.gpus[index];
  require(gpu.is_supported(),
          "GPU {} is a {} of compute capability {}.{}; the kernels need a Hopper GPU (9.0): an "
          "H100, H200 or GH200. Choose one by CUDA_VISIBLE_DEVICES, or set run.device = \"cpu\"",
          index, gpu.name, gpu.compute_major, gpu.compute_minor);
}

Backend make_cuda_backend(int index) {
  check_gpu(index);
  auto device = std::make_shared<cuda::CudaDevice>(index);
  int num_sms = 0;
  cuda::check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, index));
  auto context = std::make_shared<cuda::CudaContext>(device->stream(), num_sms);
  auto side = std::make_shared<cuda::SideStream>(device, num_sms);
  return {std::move(device), std::move(context), make_cuda_kernels(), std::move(side)};
}

Backend make_planned_cuda_backend() {
  return {std::make_shared<PlannedGpu>(), nullptr, make_cuda_kernels(),
          std::make_shared<PlannedSide>()};
}

}  // namespace tessera
