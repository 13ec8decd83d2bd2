#include "train/device_choice.h"

#include "ops/registry/cpu_kernels.h"
#include "runtime/cuda/cuda_backend.h"

namespace tessera {
namespace {

constexpr int kHopper = 9;

bool has_usable_gpu() {
  if (!built_with_cuda()) return false;
  const GpuList list = list_gpus();
  return !list.gpus.empty() && list.gpus[0].compute_major == kHopper;
}

}  // namespace

Backend choose_backend(const Settings& settings, int64_t num_ranks) {
  const DeviceChoice choice = settings.run.device;
  if (choice == DeviceChoice::kCuda) {
    require(num_ranks == 1,
            "run.device = \"cuda\" runs on one rank, got {}: communication between GPUs is not "
            "there yet; use one rank, or run.device = \"cpu\"",
            num_ranks);
    return make_cuda_backend(0);
  }
  if (choice == DeviceChoice::kAuto && num_ranks == 1 && has_usable_gpu())
    return make_cuda_backend(0);
  return make_cpu_kernels();
}

}  // namespace tessera
