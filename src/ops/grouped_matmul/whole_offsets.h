#pragma once

#include <array>
#include <map>

#include "ops/cuda/check.h"
#include "ops/cuda/context.h"
#include "ops/cuda/device_buffer.h"

namespace tessera::cuda {

/// The offsets of one expert that has all rows, in the GPU's memory, by their number. Got by
/// context.get<WholeOffsets>().
class WholeOffsets {
 public:
  explicit WholeOffsets(const CudaContext& context) : stream_(context.stream()) {}

  const int64_t* of(int64_t num_rows) {
    const auto [found, is_new] = offsets_.try_emplace(num_rows, 2 * sizeof(int64_t));
    if (is_new) {
      const std::array<int64_t, 2> both = {0, num_rows};
      check(cudaMemcpyAsync(found->second.as<void>(), both.data(), sizeof(both),
                            cudaMemcpyHostToDevice, stream_));
      check(cudaStreamSynchronize(stream_));
    }
    return found->second.as<int64_t>();
  }

 private:
  cudaStream_t stream_;
  std::map<int64_t, DeviceBuffer> offsets_;
};

}  // namespace tessera::cuda
