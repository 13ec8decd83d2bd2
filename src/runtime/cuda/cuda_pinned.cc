#include "runtime/cuda/cuda_pinned.h"

#include <cuda_runtime.h>
#include <sys/mman.h>

#include <cstring>

#include "core/memory.h"
#include "ops/cuda/check.h"

namespace tessera::cuda {
namespace {

/// From here on threads share the work.
constexpr int64_t kMuch = int64_t{1} << 28;
constexpr int64_t kHugePage = int64_t{1} << 21;
constexpr int64_t kPage = 4096;

bool is_refused(cudaError_t status) {
  if (status == cudaSuccess) return false;
  if (status != cudaErrorMemoryAllocation) check(status);
  cudaGetLastError();  // so that the next call does not report it
  return true;
}

int64_t mapped_bytes(int64_t num_bytes) {
  return align_up(num_bytes, kHugePage);
}

/// Makes the system give the memory, zeroed, to addresses that it has promised.
void touch_pages(std::byte* data, int64_t num_bytes) {
#pragma omp parallel for schedule(static)
  for (int64_t begin = 0; begin < num_bytes; begin += kHugePage) {
    for (int64_t page = begin; page < begin + kHugePage; page += kPage) data[page] = std::byte{0};
  }
}

std::byte* register_much(int64_t num_bytes) {
  const int64_t bytes = mapped_bytes(num_bytes);
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  madvise(data, bytes, MADV_HUGEPAGE);  // a wish
  madvise(data, bytes, MADV_DONTFORK);  // a child would get copies of pages that are pinned
  auto* const begin = static_cast<std::byte*>(data);
  touch_pages(begin, bytes);
  if (!is_refused(cudaHostRegister(data, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable)))
    return begin;
  munmap(data, bytes);
  return nullptr;
}

}  // namespace

std::byte* allocate_pinned(int64_t num_bytes) {
  if (num_bytes >= kMuch) return register_much(num_bytes);
  void* data = nullptr;
  if (is_refused(cudaHostAlloc(&data, num_bytes, cudaHostAllocMapped | cudaHostAllocPortable)))
    return nullptr;
  std::memset(data, 0, num_bytes);
  return static_cast<std::byte*>(data);
}

void release_pinned(std::byte* data, int64_t num_bytes) noexcept {
  if (num_bytes < kMuch) {
    cudaFreeHost(data);
    return;
  }
  cudaHostUnregister(data);
  munmap(data, mapped_bytes(num_bytes));
}

}  // namespace tessera::cuda
