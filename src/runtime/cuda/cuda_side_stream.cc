#include "runtime/cuda/cuda_side_stream.h"

#include <utility>

#include "ops/cuda/check.h"

namespace tessera::cuda {

bool suits_side_stream(const Cost& cost) {
  constexpr double kMostFlops = 1e10;
  return cost.flops < kMostFlops;
}

SideStream::SideStream(std::shared_ptr<CudaDevice> device, int num_sms)
    : device_(std::move(device)) {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  check(cudaEventCreateWithFlags(&fork_, cudaEventDisableTiming));
  check(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming));
  context_ = std::make_unique<CudaContext>(stream_, num_sms);
}

SideStream::~SideStream() {
  cudaStreamSynchronize(stream_);
  context_.reset();
  cudaEventDestroy(fork_);
  cudaEventDestroy(done_);
  cudaStreamDestroy(stream_);
}

void SideStream::give(const std::function<void()>& start) {
  check(cudaEventRecord(fork_, device_->stream()));
  check(cudaStreamWaitEvent(stream_, fork_));
  is_under_way_ = true;
  start();
}

void SideStream::join() {
  if (!std::exchange(is_under_way_, false)) return;
  check(cudaEventRecord(done_, stream_));
  check(cudaStreamWaitEvent(device_->stream(), done_));
}

}  // namespace tessera::cuda
