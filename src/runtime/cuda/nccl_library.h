#pragma once

#include <nccl.h>

namespace tessera::cuda {

/// NCCL's functions, from the library that is loaded when several GPUs first communicate, so that
/// programs on one GPU run where there is none.
struct NcclLibrary {
  /// Loads it once. Throws UserError where it cannot be found or is older than 2.18.
  static const NcclLibrary& get();
  /// Throws InternalError with NCCL's own words; an operation that is under way is no error.
  void check(ncclResult_t status) const;

  int version = 0;  ///< as NCCL_VERSION_CODE
  decltype(&::ncclGetVersion) get_version;
  decltype(&::ncclGetErrorString) get_error_string;
  decltype(&::ncclGetUniqueId) get_unique_id;
  decltype(&::ncclCommInitRankConfig) comm_init;
  decltype(&::ncclCommGetAsyncError) comm_error;
  decltype(&::ncclCommDestroy) comm_destroy;
  decltype(&::ncclCommAbort) comm_abort;
  decltype(&::ncclGroupStart) group_start;
  decltype(&::ncclGroupEnd) group_end;
  decltype(&::ncclAllGather) all_gather;
  decltype(&::ncclAllReduce) all_reduce;
  decltype(&::ncclReduceScatter) reduce_scatter;
  decltype(&::ncclReduce) reduce;
  decltype(&::ncclBroadcast) broadcast;
  decltype(&::ncclSend) send;
  decltype(&::ncclRecv) receive;
};

}  // namespace tessera::cuda
