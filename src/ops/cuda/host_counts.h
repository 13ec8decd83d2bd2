#pragma once

#include <map>
#include <vector>

#include "ops/cuda/context.h"

namespace tessera::cuda {

/// Numbers that kernels find and the host needs soon after, such as how many rows go to each rank:
/// their copies begin when the GPU has found them, so that whoever reads them, maybe several times,
/// waits for no more than that. Of a context: CudaContext::get.
class HostCounts {
 public:
  explicit HostCounts(CudaContext& context) : stream_(context.stream()) {}
  ~HostCounts();
  HostCounts(const HostCounts&) = delete;
  HostCounts& operator=(const HostCounts&) = delete;

  /// Begins to copy I64 counts that work given before writes. Until this is called again for the
  /// same address, nothing else may be written there that is read as counts.
  void keep(const Tensor& counts);
  /// The counts: those kept of that address, or else read now, behind all work given before. Where
  /// the GPU then finds others there than were kept, its next synchronisation fails.
  std::vector<int64_t> read(const Tensor& counts);

 private:
  struct Copy {
    int64_t* host = nullptr;  ///< pinned
    int64_t size = 0;
    cudaEvent_t made = nullptr;
  };
  static void wait(const Copy& copy, Device& device);

  cudaStream_t stream_;
  std::map<const void*, Copy> copies_;
};

}  // namespace tessera::cuda
