#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"
#include "ops/paged_attention/kept_rows_args.h"

namespace tessera::cuda {

/// See CompressWindowsCached.
struct CachedWindows {
  DType dtype;
  int64_t num_tokens;
  int64_t width;  ///< S·D
  int64_t size;   ///< D
  int rate;
  bool overlaps;
  int num_slots;
  int64_t first_entry;
  KeptTokensArgs tokens;
  const int32_t* slots;  ///< null: all are of slot 0
  const void* kv;
  const void* gate;
  const float* bias;
  void* state;
};
struct CachedEntries {
  void* entries;
  int32_t* positions;
  int32_t* rows;
};
void launch_compress_windows_cached(const CachedWindows& call, const CachedEntries& to,
                                    cudaStream_t stream);

}  // namespace tessera::cuda
