#pragma once

#include <cuda.h>

#include <cstdint>

namespace tessera::cuda {

/// A row-major matrix in the GPU's memory.
struct DeviceMatrix {
  const void* data = nullptr;
  int64_t num_rows = 0;
  int64_t num_columns = 0;
};

/// Describes a BF16 matrix to the copy engine, which moves boxes of `box_rows` by `box_columns` of
/// it to and from shared memory, swizzled over 128 bytes: box_columns fill 128 bytes. What a box
/// covers beyond the matrix reads as zero and is not written. Throws UserError where a row is no
/// multiple of 16 bytes, and InternalError where the driver refuses.
CUtensorMap make_tensor_map(const DeviceMatrix& matrix, int box_rows);

/// BF16 rows that hold `num_heads` heads of `head_size` values each.
struct DeviceHeads {
  const void* data = nullptr;
  int64_t num_rows = 0;
  int64_t num_heads = 0;
  int64_t head_size = 0;
};

/// Describes heads to the copy engine, which moves boxes of `box_rows` by 64 values of one head,
/// swizzled over 128 bytes: what a box covers beyond a head's values or beyond the rows reads as
/// zero. Throws UserError where head_size is no multiple of 8.
CUtensorMap make_heads_map(const DeviceHeads& heads, int box_rows);

}  // namespace tessera::cuda
