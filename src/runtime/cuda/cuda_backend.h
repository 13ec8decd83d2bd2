#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/options.h"
#include "ops/backend.h"

namespace tessera {

/// A GPU as `doctor` shows it.
struct GpuInfo {
  std::string name;
  int64_t memory = 0;  ///< bytes
  int compute_major = 0;
  int compute_minor = 0;
  uint64_t id = 0;  ///< the same wherever this GPU is seen from, and no other's

  /// Whether the kernels run on it: they are for Hopper alone.
  bool is_supported() const {
    constexpr int kHopper = 9;
    return compute_major == kHopper;
  }
};

/// Where GPU `index` is on the PCI bus, such as "0000:3b:00.0"; empty where that is not known.
std::string gpu_pci_address(int index);

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
/// Whether several GPUs can communicate: NCCL, which is loaded when the program runs.
struct NcclInfo {
  bool built = false;  ///< the program can use it
  int version = 0;     ///< 10000 · major + 100 · minor + patch; 0: it cannot be had
  std::string why;     ///< why not
};
NcclInfo find_nccl();
/// The ranks of `host` with a GPU each, this one's being that of `backend`. Tensors in the GPUs'
/// memory travel by NCCL, the host's through `host`, which must outlive it. REQUIRES find_nccl() to
/// have found it on every rank.
std::unique_ptr<World> make_gpu_world(World& host, const Backend& backend,
                                      const CommOptions& options);

/// The kernels of a GPU that need not be there: programs are planned, and what these kernels do not
/// take is refused, but nothing can be allocated or run. Throws UserError where the program was
/// built without CUDA.
Backend make_planned_cuda_backend();

}  // namespace tessera
