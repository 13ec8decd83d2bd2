#include "ops/cuda/host_counts.h"

#include <algorithm>
#include <chrono>

#include "core/host_tensor.h"
#include "ops/cuda/check.h"
#include "ops/cuda/count_check.h"

namespace tessera::cuda {
namespace {

/// How long to look at an event alone; then the device is waited for, which notices lost ranks.
constexpr std::chrono::milliseconds kPatience{200};

size_t bytes_of(int64_t count) {
  return static_cast<size_t>(count) * sizeof(int64_t);
}

}  // namespace

HostCounts::~HostCounts() {
  for (const auto& [address, copy] : copies_) {
    cudaEventSynchronize(copy.made);
    cudaEventDestroy(copy.made);
    cudaFreeHost(copy.host);
  }
}

void HostCounts::keep(const Tensor& counts) {
  Copy& copy = copies_[counts.data];
  const int64_t size = counts.num_elements();
  if (copy.made == nullptr) check(cudaEventCreateWithFlags(&copy.made, cudaEventDisableTiming));
  if (copy.size < size) {
    if (copy.host != nullptr) check(cudaEventSynchronize(copy.made));
    cudaFreeHost(copy.host);
    void* host = nullptr;
    check(cudaHostAlloc(&host, bytes_of(size), cudaHostAllocMapped | cudaHostAllocPortable));
    copy.host = static_cast<int64_t*>(host);
  }
  copy.size = size;
  check(
      cudaMemcpyAsync(copy.host, counts.as<int64_t>(), bytes_of(size), cudaMemcpyDefault, stream_));
  check(cudaEventRecord(copy.made, stream_));
}

void HostCounts::wait(const Copy& copy, Device& device) {
  const auto begin = std::chrono::steady_clock::now();
  for (;;) {
    const cudaError_t status = cudaEventQuery(copy.made);
    if (status == cudaSuccess) return;
    if (status != cudaErrorNotReady || std::chrono::steady_clock::now() - begin > kPatience)
      return device.synchronize();
  }
}

std::vector<int64_t> HostCounts::read(const Tensor& counts) {
  const auto found = copies_.find(counts.data);
  if (found == copies_.end() || found->second.size != counts.num_elements()) {
    const HostTensor host(counts, HostTensor::Access::kRead);
    const auto values = host.get().span<int64_t>();
    return {values.begin(), values.end()};
  }
  const Copy& copy = found->second;
  ensure(counts.device != nullptr, "counts of the host were kept as a GPU's");
  wait(copy, *counts.device);
  launch_count_check(counts.as<int64_t>(), copy.host, copy.size, stream_);
  return {copy.host, copy.host + copy.size};
}

int64_t CudaContext::read_count(const Tensor& count) {
  return get<HostCounts>().read(count).at(0);
}

}  // namespace tessera::cuda
