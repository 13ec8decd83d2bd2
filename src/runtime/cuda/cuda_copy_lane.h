#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "runtime/cuda/cuda_device.h"

namespace tessera::cuda {

/// A stream of its own for copies between a GPU and pinned memory of the host, which a copy engine
/// makes beside kernels. In a recording it is a branch of the graph. Work of the host is done by a
/// thread of CUDA's, and by one thread of OpenMP's less than the thread that feeds the GPU has.
class StreamCopyLane final : public CopyLane {
 public:
  explicit StreamCopyLane(std::shared_ptr<CudaDevice> device);
  ~StreamCopyLane() override;

  Ticket give_parts(std::span<const Part> parts) override;
  Ticket give_work(std::function<void()> work) override;
  void join(Ticket copy) override;

 private:
  cudaEvent_t take_event();
  void follow_device();
  Ticket mark();

  std::shared_ptr<CudaDevice> device_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t fork_ = nullptr;
  std::map<Ticket, cudaEvent_t> under_way_;  ///< each behind its copy
  std::vector<cudaEvent_t> free_;            ///< of copies that were joined
  Ticket next_ = 0;
};

}  // namespace tessera::cuda
