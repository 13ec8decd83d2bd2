#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <map>

namespace tessera::cuda {

/// A GPU's memory by pages, through the driver's management of virtual memory: addresses are
/// reserved, and memory is mapped to them while kernels run. What a graph or a tensor map knows are
/// addresses, so they stay valid.
class CudaPages {
 public:
  /// The size of all pages on Hopper GPUs.
  static constexpr int64_t kBytes = 2 << 20;

  explicit CudaPages(int device_index);

  /// See Device, of the same names.
  std::byte* reserve(int64_t num_bytes);
  bool commit(std::byte* pages, int64_t num_bytes);
  /// REQUIRES that no work uses the memory any more.
  void decommit(std::byte* pages, int64_t num_bytes);
  void release(std::byte* data, int64_t num_bytes) noexcept;

 private:
  using Mapped = std::map<std::byte*, int64_t>;  // bytes of what is unmapped whole, by address

  CUmemAllocationProp where_{};
  std::map<std::byte*, Mapped> reserved_;  // by the first address of each
};

}  // namespace tessera::cuda
