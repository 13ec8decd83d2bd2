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
};

/// Whether the program was built with CUDA.
bool built_with_cuda();
/// The GPUs that can be used; where there are none, `why` says why not.
struct GpuList {
  std::vector<GpuInfo> gpus;
  std::string why;
};
GpuList list_gpus();

/// GPU `index` with the kernels of all operators that run on it. Throws UserError where the program
/// was built without CUDA or there is no such Hopper GPU.
Backend make_cuda_backend(int index);

}  // namespace tessera
