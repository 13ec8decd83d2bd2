#include "runtime/cuda/nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "core/error.h"

namespace tessera::cuda {
namespace {

constexpr int kOldestVersion = 21800;

void* open_library() {
  // Sums that a switch makes of multicast memory have no fixed order.
  ::setenv("NCCL_NVLS_ENABLE", "0", /*overwrite=*/0);
  void* handle = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  require(handle != nullptr,
          "NCCL, by which several GPUs communicate, cannot be loaded: {}; install libnccl2, or add "
          "the folder of libnccl.so.2 (nvidia/nccl/lib of PyTorch's packages) to LD_LIBRARY_PATH",
          ::dlerror());
  return handle;
}

template <typename Function>
void find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(handle, name));
  require(function != nullptr, "NCCL's library has no {}; version 2.18 or later is needed", name);
}

NcclLibrary load() {
  void* const handle = open_library();
  NcclLibrary library{};
  find(handle, "ncclGetVersion", library.get_version);
  find(handle, "ncclGetErrorString", library.get_error_string);
  find(handle, "ncclGetUniqueId", library.get_unique_id);
  find(handle, "ncclCommInitRankConfig", library.comm_init);
  find(handle, "ncclCommGetAsyncError", library.comm_error);
  find(handle, "ncclCommDestroy", library.comm_destroy);
  find(handle, "ncclCommAbort", library.comm_abort);
  find(handle, "ncclGroupStart", library.group_start);
  find(handle, "ncclGroupEnd", library.group_end);
  find(handle, "ncclAllGather", library.all_gather);
  find(handle, "ncclAllReduce", library.all_reduce);
  find(handle, "ncclReduceScatter", library.reduce_scatter);
  find(handle, "ncclReduce", library.reduce);
  find(handle, "ncclBroadcast", library.broadcast);
  find(handle, "ncclSend", library.send);
  find(handle, "ncclRecv", library.receive);
  library.check(library.get_version(&library.version));
  require(library.version >= kOldestVersion, "NCCL {} was loaded; {} or later is needed",
          library.version, kOldestVersion);
  return library;
}

}  // namespace

const NcclLibrary& NcclLibrary::get() {
  static const NcclLibrary library = load();
  return library;
}

void NcclLibrary::check(ncclResult_t status) const {
  ensure(status == ncclSuccess || status == ncclInProgress, "NCCL: {}", get_error_string(status));
}

}  // namespace tessera::cuda
