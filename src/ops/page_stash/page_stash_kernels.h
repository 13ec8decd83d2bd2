#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace tessera::cuda {

/// A value in memory and where it is stashed (see StashPages). `rows` is null where all came.
struct PagedValue {
  std::byte* value;
  const int64_t* rows;
  int64_t bound;
  int64_t row_bytes;
  std::byte* pages;
  int64_t page_bytes;
  int32_t* free;
  int64_t* state;
  int32_t* table;
  bool is_float;
};
void launch_stash_pages(const PagedValue& call, cudaStream_t stream);
void launch_reload_pages(const PagedValue& call, cudaStream_t stream);

}  // namespace tessera::cuda
