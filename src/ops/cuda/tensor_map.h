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

enum class MapType { kBf16, kF32 };

/// Describes a matrix to the copy engine, which moves boxes of `box_rows` by `box_columns` of it to
/// and from shared memory, swizzled over 128 bytes: box_columns fill 128 bytes. What a box covers
/// beyond the matrix reads as zero and is not written. Throws UserError where a row is no multiple
/// of 16 bytes, and CudaError where the driver refuses.
CUtensorMap make_tensor_map(const DeviceMatrix& matrix, MapType type, int box_rows);

}  // namespace tessera::cuda
