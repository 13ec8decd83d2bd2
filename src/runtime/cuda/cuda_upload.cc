#include "runtime/cuda/cuda_upload.h"

#include <cstring>
#include <utility>

#include "core/memory.h"
#include "ops/cuda/check.h"

namespace tessera::cuda {

UploadRing::UploadRing(cudaStream_t stream, std::function<void(cudaEvent_t)> wait)
    : stream_(stream), wait_(std::move(wait)) {
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, kParts * static_cast<size_t>(kMostBytes), cudaHostAllocDefault));
  memory_ = static_cast<std::byte*>(memory);
  for (cudaEvent_t& event : left_) check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
}

UploadRing::~UploadRing() {
  cudaStreamSynchronize(stream_);
  for (cudaEvent_t event : left_) cudaEventDestroy(event);
  cudaFreeHost(memory_);
}

void UploadRing::begin_next_part() {
  check(cudaEventRecord(left_[part_], stream_));
  part_ = (part_ + 1) % kParts;
  used_ = 0;
  // Complete at once where the part was never used.
  const cudaError_t status = cudaEventQuery(left_[part_]);
  if (status == cudaSuccess) return;
  if (status != cudaErrorNotReady) check(status);
  cudaGetLastError();
  wait_(left_[part_]);
}

void UploadRing::upload(void* to, const void* from, int64_t num_bytes) {
  if (used_ + num_bytes > kMostBytes) begin_next_part();
  std::byte* const at = part() + used_;
  std::memcpy(at, from, num_bytes);
  used_ += align_up(num_bytes);
  check(cudaMemcpyAsync(to, at, num_bytes, cudaMemcpyHostToDevice, stream_));
}

}  // namespace tessera::cuda
