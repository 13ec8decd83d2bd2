#pragma once

#include <memory>

#include "ops/backend.h"
#include "ops/cuda/context.h"
#include "runtime/cuda/cuda_device.h"

namespace tessera::cuda {

/// Whether a kernel of this cost is so short that it leaves SMs idle, which others can use: at a
/// Hopper GPU's rate of products 15 us.
bool suits_side_stream(const Cost& cost);

/// A second stream of a GPU. In a recording it is a branch of the graph.
class SideStream final : public SideLane {
 public:
  SideStream(std::shared_ptr<CudaDevice> device, int num_sms);
  ~SideStream() override;

  bool suits(const Cost& cost) const override { return suits_side_stream(cost); }
  KernelContext* context() const override { return context_.get(); }
  void give(const std::function<void()>& start) override;
  void join() override;

 private:
  std::shared_ptr<CudaDevice> device_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t fork_ = nullptr;
  cudaEvent_t done_ = nullptr;
  std::unique_ptr<CudaContext> context_;
  bool is_under_way_ = false;  ///< work was given since the last join
};

}  // namespace tessera::cuda
