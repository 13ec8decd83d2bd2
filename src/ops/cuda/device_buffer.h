#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

#include "core/error.h"
#include "core/memory.h"
#include "ops/cuda/check.h"

namespace tessera::cuda {

/// Memory of the current GPU, given back at the end of its life.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t num_bytes) : num_bytes_(num_bytes) {
    if (num_bytes == 0) return;
    const cudaError_t status = cudaMalloc(&data_, num_bytes);
    require(
        status != cudaErrorMemoryAllocation,
        "out of memory: {} of scratch memory cannot be had on the GPU; use a smaller micro-batch "
        "or model, or more recomputation",
        format_bytes(static_cast<int64_t>(num_bytes)));
    check(status);
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), num_bytes_(other.num_bytes_) {}
  DeviceBuffer& operator=(DeviceBuffer&&) = delete;
  ~DeviceBuffer() { cudaFree(data_); }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t num_bytes() const { return num_bytes_; }
  void copy_from(const void* host) const {
    if (num_bytes_ > 0) check(cudaMemcpy(data_, host, num_bytes_, cudaMemcpyHostToDevice));
  }
  void copy_to(void* host) const {
    if (num_bytes_ > 0) check(cudaMemcpy(host, data_, num_bytes_, cudaMemcpyDeviceToHost));
  }

 private:
  void* data_ = nullptr;
  size_t num_bytes_;
};

}  // namespace tessera::cuda
