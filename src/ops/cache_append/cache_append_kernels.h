#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"

namespace tessera::cuda {

/// cache [capacity, width]: rows *start to *start + num_rows become `rows`.
struct CacheRows {
  DType dtype;
  int64_t num_rows;
  int64_t width;
  int64_t capacity;
  const void* rows;
  const int32_t* start;
  void* cache;
};
void launch_cache_append(const CacheRows& call, cudaStream_t stream);

}  // namespace tessera::cuda
