// Pages are given and taken by one block, whose work is a few hundred bytes, and copied by many,
// which read there how many there are: the host knows the bound alone.
#include <algorithm>

#include "ops/cuda/check.h"
#include "ops/page_stash/page_pool.h"
#include "ops/page_stash/page_stash_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
/// Enough blocks that copies move at full speed on any Hopper GPU.
constexpr int64_t kMostBlocks = 1056;

struct Extent {
  int64_t num_bytes;
  int64_t num_pages;
};

__device__ Extent extent_of(const PagedValue& call) {
  const int64_t rows = call.rows == nullptr ? call.bound : min(*call.rows, call.bound);
  const int64_t bytes = rows * call.row_bytes;
  return {bytes, (bytes + call.page_bytes - 1) / call.page_bytes};
}

__global__ void __launch_bounds__(kThreads) take_pages(PagedValue call) {
  const int64_t wanted = extent_of(call).num_pages;
  const int64_t num_free = call.state[kFreePages];
  __syncthreads();
  if (wanted == 0) return;
  if (threadIdx.x == 0) {
    const int64_t held = call.state[kHeldPages] + wanted;
    call.state[kHeldPages] = held;
    call.state[kMissingPages] = max(call.state[kMissingPages], held - call.state[kPoolPages]);
    if (wanted > num_free) call.table[0] = -1;
  }
  if (wanted > num_free) return;
  for (int64_t i = threadIdx.x; i < wanted; i += kThreads)
    call.table[i] = call.free[num_free - 1 - i];
  if (threadIdx.x == 0) call.state[kFreePages] = num_free - wanted;
}

__global__ void __launch_bounds__(kThreads) give_pages(PagedValue call) {
  const int64_t taken = extent_of(call).num_pages;
  const int64_t num_free = call.state[kFreePages];
  __syncthreads();
  if (taken == 0) return;
  if (threadIdx.x == 0) call.state[kHeldPages] -= taken;
  if (call.table[0] < 0) return;
  for (int64_t i = threadIdx.x; i < taken; i += kThreads)
    call.free[num_free + taken - 1 - i] = call.table[i];
  if (threadIdx.x == 0) call.state[kFreePages] = num_free + taken;
}

/// Whole vectors of 16 bytes, and single bytes at the value's end.
__device__ void copy_bytes(std::byte* to, const std::byte* from, int64_t num_bytes) {
  const int64_t vectors = num_bytes / static_cast<int64_t>(sizeof(uint4));
  for (int64_t i = threadIdx.x; i < vectors; i += kThreads)
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  for (int64_t i = vectors * static_cast<int64_t>(sizeof(uint4)) + threadIdx.x; i < num_bytes;
       i += kThreads)
    to[i] = from[i];
}

template <bool kReload>
__global__ void __launch_bounds__(kThreads) copy_pages(PagedValue call) {
  const Extent extent = extent_of(call);
  const bool found_room = extent.num_pages == 0 || call.table[0] >= 0;
  for (int64_t page = blockIdx.x; page < extent.num_pages; page += gridDim.x) {
    const int64_t at = page * call.page_bytes;
    const int64_t bytes = min(call.page_bytes, extent.num_bytes - at);
    std::byte* const own = call.value + at;
    if (found_room) {
      std::byte* const there = call.pages + call.table[page] * call.page_bytes;
      copy_bytes(kReload ? own : there, kReload ? there : own, bytes);
    } else if (kReload) {
      for (int64_t i = threadIdx.x; i < bytes; i += kThreads)
        own[i] = call.is_float ? std::byte{0xFF} : std::byte{0};
    }
  }
}

unsigned num_blocks(const PagedValue& call) {
  const int64_t most = (call.bound * call.row_bytes + call.page_bytes - 1) / call.page_bytes;
  return static_cast<unsigned>(std::min(most, kMostBlocks));
}

}  // namespace

void launch_stash_pages(const PagedValue& call, cudaStream_t stream) {
  if (call.bound * call.row_bytes == 0) return;
  take_pages<<<1, kThreads, 0, stream>>>(call);
  check(cudaGetLastError());
  copy_pages<false><<<num_blocks(call), kThreads, 0, stream>>>(call);
  check(cudaGetLastError());
}

void launch_reload_pages(const PagedValue& call, cudaStream_t stream) {
  if (call.bound * call.row_bytes == 0) return;
  copy_pages<true><<<num_blocks(call), kThreads, 0, stream>>>(call);
  check(cudaGetLastError());
  give_pages<<<1, kThreads, 0, stream>>>(call);
  check(cudaGetLastError());
}

}  // namespace tessera::cuda
