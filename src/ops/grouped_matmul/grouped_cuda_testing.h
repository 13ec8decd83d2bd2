#pragma once

#include <vector>

#include "ops/cuda/device_buffer.h"

/// Data of grouped products on a GPU, for tests of their kernels.
namespace tessera::cuda {

/// Where each of several parts ends, after 0.
template <typename To = int64_t>
std::vector<To> ends(const std::vector<int64_t>& counts) {
  std::vector<To> result{0};
  for (const int64_t count : counts) result.push_back(result.back() + static_cast<To>(count));
  return result;
}

template <typename T>
DeviceBuffer to_device(const std::vector<T>& values) {
  DeviceBuffer buffer(values.size() * sizeof(T));
  buffer.copy_from(values.data());
  return buffer;
}

}  // namespace tessera::cuda
