#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tessera::cuda {

/// A matrix of rows [T, P · part] and the same as parts [P, T, part], in bytes.
struct RowParts {
  int64_t num_parts;
  int64_t num_rows;
  int64_t part_bytes;
};

/// to [P, T, part] = from [T, P · part].
void launch_split_rows(const RowParts& parts, const void* from, void* to, cudaStream_t stream);
/// to [T, P · part] = from [P, T, part].
void launch_join_rows(const RowParts& parts, const void* from, void* to, cudaStream_t stream);

}  // namespace tessera::cuda
