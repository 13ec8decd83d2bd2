#include "runtime/cuda/cuda_pages.h"

#include <cuda_runtime.h>

#include <bit>
#include <iterator>

#include "core/error.h"
#include "ops/cuda/check.h"

namespace tessera::cuda {
namespace {

void check_driver(CUresult status, const char* what) {
  ensure(status == CUDA_SUCCESS, "{} failed: CUDA driver error {}", what, static_cast<int>(status));
}

void* find_entry(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found));
  ensure(found == cudaDriverEntryPointSuccess && entry != nullptr, "the CUDA driver has no {}",
         name);
  return entry;
}

/// The driver's functions, which the program is not linked with.
struct Driver {
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
};

template <typename Function>
void find(Function& function, const char* name) {
  function = reinterpret_cast<Function>(find_entry(name));
}

const Driver& driver() {
  static const Driver found = [] {
    Driver made{};
    find(made.reserve, "cuMemAddressReserve");
    find(made.free, "cuMemAddressFree");
    find(made.create, "cuMemCreate");
    find(made.release, "cuMemRelease");
    find(made.map, "cuMemMap");
    find(made.unmap, "cuMemUnmap");
    find(made.set_access, "cuMemSetAccess");
    return made;
  }();
  return found;
}

CUdeviceptr address_of(const std::byte* data) {
  return reinterpret_cast<CUdeviceptr>(data);
}

}  // namespace

CudaPages::CudaPages(int device_index) {
  where_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  where_.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_index};
}

std::byte* CudaPages::reserve(int64_t num_bytes) {
  CUdeviceptr address = 0;
  const CUresult status = driver().reserve(&address, num_bytes, kBytes, 0, 0);
  if (status == CUDA_ERROR_OUT_OF_MEMORY) return nullptr;
  check_driver(status, "cuMemAddressReserve");
  auto* const data = std::bit_cast<std::byte*>(address);
  reserved_[data];
  return data;
}

bool CudaPages::commit(std::byte* pages, int64_t num_bytes) {
  CUmemGenericAllocationHandle memory{};
  const CUresult status = driver().create(&memory, num_bytes, &where_, 0);
  if (status == CUDA_ERROR_OUT_OF_MEMORY) return false;
  check_driver(status, "cuMemCreate");
  const CUresult mapped = driver().map(address_of(pages), num_bytes, 0, memory, 0);
  driver().release(memory);  // it lives as long as it is mapped
  check_driver(mapped, "cuMemMap");
  std::prev(reserved_.upper_bound(pages))->second[pages] = num_bytes;
  const CUmemAccessDesc access{where_.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  check_driver(driver().set_access(address_of(pages), num_bytes, &access, 1), "cuMemSetAccess");
  return true;
}

void CudaPages::decommit(std::byte* pages, int64_t num_bytes) {
  Mapped& mapped = std::prev(reserved_.upper_bound(pages))->second;
  const auto found = mapped.find(pages);
  ensure(found != mapped.end() && found->second == num_bytes,
         "{} bytes of memory are taken back that were not given together", num_bytes);
  check_driver(driver().unmap(address_of(pages), num_bytes), "cuMemUnmap");
  mapped.erase(found);
}

void CudaPages::release(std::byte* data, int64_t num_bytes) noexcept {
  const auto found = reserved_.find(data);
  if (found == reserved_.end()) return;
  for (const auto& [pages, size] : found->second) driver().unmap(address_of(pages), size);
  driver().free(address_of(data), num_bytes);
  reserved_.erase(found);
}

}  // namespace tessera::cuda
