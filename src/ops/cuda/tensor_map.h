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

/// Describes a BF16 matrix to TMA, which moves boxes of `box_rows` by `box_columns` (64
/// or 32) of it to and from shared memory, swizzled over their 128 or 64 bytes. What a box covers
/// beyond the matrix reads as zero and is not written. Throws UserError where a row is no multiple
/// of 16 bytes, and InternalError where the driver refuses.
CUtensorMap make_tensor_map(const DeviceMatrix& matrix, int box_rows, int box_columns = 64);

/// The same for a matrix of bytes, such as FP8 values, and boxes of 128 columns.
CUtensorMap make_byte_map(const DeviceMatrix& matrix, int box_rows);

/// BF16 matrices [2 num_pairs, num_columns] that follow one another, whose rows r and r + num_pairs
/// belong together.
struct DevicePairs {
  const void* data = nullptr;
  int64_t num_matrices = 0;
  int64_t num_pairs = 0;
  int64_t num_columns = 0;
};

/// Describes pairs to TMA, which moves boxes of `box_rows` by 64 values of one matrix,
/// swizzled over 128 bytes: 8 first rows of pairs, their 8 second rows, the next 8 first ones and
/// so on. What a box covers beyond the matrix reads as zero. Throws UserError where num_pairs or
/// num_columns is no multiple of 8.
CUtensorMap make_pairs_map(const DevicePairs& pairs, int box_rows);

/// The BF16 values of matrices with num_columns columns (a multiple of 64) that lie without gaps
/// from any multiple of 64 values on, among num_values in all: what a block-sparse matrix of
/// experts is.
struct DeviceBlocks {
  const void* data = nullptr;
  int64_t num_values = 0;
  int64_t num_columns = 0;
};

/// Rows that a box of blocks can begin before the place where its matrix's rows, or a part, end.
constexpr int kBlocksMapRows = 256;

/// Describes them to TMA, which moves boxes of `box_rows` by 64 values, swizzled over 128 bytes.
/// Such a box is found from where its rows end, so that what it covers beyond is out of the map and
/// not another matrix's; see BlockBox (block_box.cuh).
CUtensorMap make_blocks_map(const DeviceBlocks& blocks, int box_rows);

/// BF16 rows that hold `num_heads` heads of `head_size` values each.
struct DeviceHeads {
  const void* data = nullptr;
  int64_t num_rows = 0;
  int64_t num_heads = 0;
  int64_t head_size = 0;
};

/// Describes heads to TMA, which moves boxes of `box_rows` by 64 values of one head,
/// swizzled over 128 bytes: what a box covers beyond a head's values or beyond the rows reads as
/// zero. Throws UserError where head_size is no multiple of 8.
CUtensorMap make_heads_map(const DeviceHeads& heads, int box_rows);

}  // namespace tessera::cuda
