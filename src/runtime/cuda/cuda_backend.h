#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ops/backend.h"

namespace tessera {

/// A GPU as `doctor` shows it.
struct GpuInfo {
  std::string name;
  int64_t memory = 0;  ///< bytes
  int compute_major = 0;
  int compute_minor = 0;

  /// Whether the kernels run on it: they are for Hopper alone.
  bool is_supported() const {
    constexpr int kHopper = 9;
    return compute_major == kHopper;
  }
};

/// Whether the program was built with CUDA.
bool built_with_cuda();
/// The GPUs that can be used; where there are none, `why` says why not.
struct GpuList {
  std::vector<GpuInfo> gpus;
  std::string why;
};
GpuList list_gpus();

/// Throws UserError where the program was built without CUDA or there is no such Hopper GPU. Takes
/// nothing of the GPU.
void check_gpu(int index);
/// GPU `index` with the kernels of all operators that run on it. Throws as check_gpu.
Backend make_cuda_backend(int index);
/// The kernels of a GPU that need not be there: programs are planned, and what these kernels do not
/// take is refused, but nothing can be allocated or run. Throws UserError where the program was
/// built without CUDA.
Backend make_planned_cuda_backend();

}  // namespace tessera
