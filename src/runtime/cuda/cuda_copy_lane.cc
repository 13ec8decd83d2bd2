#include "runtime/cuda/cuda_copy_lane.h"

#include <omp.h>

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "ops/cuda/check.h"

namespace tessera::cuda {
namespace {

/// Leaves a processor to the thread that feeds the GPU.
void limit_threads() {
  thread_local const int threads =
      std::max(std::min(omp_get_max_threads(), omp_get_num_procs()) - 1, 1);
  omp_set_num_threads(threads);
}

void CUDART_CB do_work(void* work) noexcept {
  const std::unique_ptr<std::function<void()>> own(static_cast<std::function<void()>*>(work));
  limit_threads();
  (*own)();
}

}  // namespace

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

void StreamCopyLane::follow_device() {
  check(cudaEventRecord(fork_, device_->stream()));
  check(cudaStreamWaitEvent(stream_, fork_));
}

CopyLane::Ticket StreamCopyLane::mark() {
  cudaEvent_t done = under_way_[next_] = take_event();
  check(cudaEventRecord(done, stream_));
  return next_++;
}

CopyLane::Ticket StreamCopyLane::give_parts(std::span<const Part> parts) {
  follow_device();
  for (const auto& [to, from, num_bytes] : parts) {
    if (num_bytes > 0) check(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, stream_));
  }
  return mark();
}

CopyLane::Ticket StreamCopyLane::give_work(std::function<void()> work) {
  ensure(!device_->is_recording(), "{}: work of the host cannot be recorded", device_->name());
  follow_device();
  auto kept = std::make_unique<std::function<void()>>(std::move(work));
  check(cudaLaunchHostFunc(stream_, do_work, kept.get()));
  static_cast<void>(kept.release());  // do_work deletes it
  return mark();
}

void StreamCopyLane::join(Ticket copy) {
  const auto found = under_way_.find(copy);
  ensure(found != under_way_.end(), "{}: copy {} is waited for twice", device_->name(), copy);
  check(cudaStreamWaitEvent(device_->stream(), found->second));
  free_.push_back(found->second);
  under_way_.erase(found);
}

}  // namespace tessera::cuda
