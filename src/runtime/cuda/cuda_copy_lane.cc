#include "runtime/cuda/cuda_copy_lane.h"

#include <utility>

#include "core/error.h"
#include "ops/cuda/check.h"

namespace tessera::cuda {

StreamCopyLane::StreamCopyLane(std::shared_ptr<CudaDevice> device) : device_(std::move(device)) {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  check(cudaEventCreateWithFlags(&fork_, cudaEventDisableTiming));
}

StreamCopyLane::~StreamCopyLane() {
  device_->finish(stream_);
  for (const auto& [copy, event] : under_way_) cudaEventDestroy(event);
  for (cudaEvent_t event : free_) cudaEventDestroy(event);
  cudaEventDestroy(fork_);
  cudaStreamDestroy(stream_);
}

cudaEvent_t StreamCopyLane::take_event() {
  cudaEvent_t event = nullptr;
  if (free_.empty()) {
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }
  event = free_.back();
  free_.pop_back();
  return event;
}

CopyLane::Ticket StreamCopyLane::give_parts(std::span<const Part> parts) {
  check(cudaEventRecord(fork_, device_->stream()));
  check(cudaStreamWaitEvent(stream_, fork_));
  for (const auto& [to, from, num_bytes] : parts) {
    if (num_bytes > 0) check(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, stream_));
  }
  cudaEvent_t done = under_way_[next_] = take_event();
  check(cudaEventRecord(done, stream_));
  return next_++;
}

void StreamCopyLane::join(Ticket copy) {
  const auto found = under_way_.find(copy);
  ensure(found != under_way_.end(), "{}: copy {} is waited for twice", device_->name(), copy);
  check(cudaStreamWaitEvent(device_->stream(), found->second));
  free_.push_back(found->second);
  under_way_.erase(found);
}

}  // namespace tessera::cuda
