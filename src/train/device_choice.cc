#include "train/device_choice.h"

#include "ops/registry/cpu_kernels.h"
#include "runtime/cuda/cuda_backend.h"

namespace tessera {
namespace {

constexpr int kGpu = 0;

bool has_usable_gpu() {
  if (!built_with_cuda()) return false;
  const GpuList list = list_gpus();
  return !list.gpus.empty() && list.gpus[kGpu].is_supported();
}

bool takes_gpu(const Settings& settings, int64_t num_ranks) {
  const DeviceChoice choice = settings.run.device;
  require(choice != DeviceChoice::kCuda || num_ranks == 1,
          "run.device = \"cuda\" runs on one rank, got {}: communication between GPUs is not there "
          "yet; use one rank, or run.device = \"cpu\"",
          num_ranks);
  if (choice == DeviceChoice::kAuto) return num_ranks == 1 && has_usable_gpu();
  return choice == DeviceChoice::kCuda;
}

}  // namespace

void check_device(const Settings& settings, int64_t num_ranks) {
  if (takes_gpu(settings, num_ranks)) check_gpu(kGpu);
}

Backend choose_backend(const Settings& settings, int64_t num_ranks) {
  return takes_gpu(settings, num_ranks) ? make_cuda_backend(kGpu) : make_cpu_kernels();
}

Backend plan_backend(const Settings& settings, int64_t num_ranks) {
  return takes_gpu(settings, num_ranks) ? make_planned_cuda_backend() : make_cpu_kernels();
}

int64_t gpu_memory() {
  const GpuList list = list_gpus();
  return list.gpus.empty() ? 0 : list.gpus[kGpu].memory;
}

}  // namespace tessera
