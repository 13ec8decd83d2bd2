#include "ops/cuda/tensor_map.h"

#include <cuda_runtime.h>

#include <span>

#include "core/error.h"
#include "ops/cuda/check.h"

namespace tessera::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Found at run time, so that the program starts where there is no driver.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found));
  ensure(found == cudaDriverEntryPointSuccess && function != nullptr,
         "the CUDA driver has no cuTensorMapEncodeTiled");
  return reinterpret_cast<Encode>(function);
}

CUtensorMap encode_map(void* data, std::span<const cuuint64_t> dims,
                       std::span<const cuuint64_t> strides, std::span<const cuuint32_t> box,
                       CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) {
  static const Encode encode = find_encode();
  constexpr cuuint32_t kSteps[] = {1, 1, 1, 1, 1};
  const CUtensorMapSwizzle swizzle =
      box[0] == 32 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
  CUtensorMap map;
  const CUresult result =
      encode(&map, type, static_cast<cuuint32_t>(dims.size()), data, dims.data(), strides.data(),
             box.data(), kSteps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  ensure(result == CUDA_SUCCESS, "the CUDA driver refused a map of {} x {} values: error {}",
         dims.back(), dims.front(), static_cast<int>(result));
  return map;
}

}  // namespace

CUtensorMap make_tensor_map(const DeviceMatrix& matrix, int box_rows, int box_columns) {
  ensure(box_columns == 64 || box_columns == 32, "boxes of {} columns", box_columns);
  constexpr uint64_t kValueBytes = 2;
  const uint64_t row_bytes = static_cast<uint64_t>(matrix.num_columns) * kValueBytes;
  require(row_bytes % 16 == 0,
          "a matrix with rows of {} bytes cannot be copied by tiles: rows must be multiples of 16 "
          "bytes",
          row_bytes);
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(matrix.num_columns),
                             static_cast<cuuint64_t>(matrix.num_rows)};
  const cuuint64_t strides[] = {row_bytes};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns),
                            static_cast<cuuint32_t>(box_rows)};
  return encode_map(const_cast<void*>(matrix.data), dims, strides, box);
}

CUtensorMap make_byte_map(const DeviceMatrix& matrix, int box_rows) {
  require(matrix.num_columns % 16 == 0,
          "a matrix with rows of {} bytes cannot be copied by tiles: rows must be multiples of 16 "
          "bytes",
          matrix.num_columns);
  const auto row_bytes = static_cast<cuuint64_t>(matrix.num_columns);
  const cuuint64_t dims[] = {row_bytes, static_cast<cuuint64_t>(matrix.num_rows)};
  const cuuint64_t strides[] = {row_bytes};
  const cuuint32_t box[] = {128, static_cast<cuuint32_t>(box_rows)};
  return encode_map(const_cast<void*>(matrix.data), dims, strides, box,
                    CU_TENSOR_MAP_DATA_TYPE_UINT8);
}

CUtensorMap make_heads_map(const DeviceHeads& heads, int box_rows) {
  require(heads.head_size % 8 == 0,
          "heads of {} values cannot be copied by tiles: the size must be a multiple of 8",
          heads.head_size);
  const auto head_bytes = static_cast<cuuint64_t>(heads.head_size * 2);
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(heads.head_size),
                             static_cast<cuuint64_t>(heads.num_heads),
                             static_cast<cuuint64_t>(heads.num_rows)};
  const cuuint64_t strides[] = {head_bytes, head_bytes * dims[1]};
  const cuuint32_t box[] = {64, 1, static_cast<cuuint32_t>(box_rows)};
  return encode_map(const_cast<void*>(heads.data), dims, strides, box);
}

CUtensorMap make_blocks_map(const DeviceBlocks& blocks, int box_rows) {
  ensure(blocks.num_columns % 64 == 0 && blocks.num_values % 64 == 0,
         "{} values in rows of {}: both must be multiples of 64", blocks.num_values,
         blocks.num_columns);
  const auto row_bytes = static_cast<cuuint64_t>(blocks.num_columns * 2);
  const auto num_places = static_cast<cuuint64_t>((blocks.num_values + blocks.num_columns) / 64);
  const cuuint64_t dims[] = {64, num_places, kBlocksMapRows};
  const cuuint64_t strides[] = {128, row_bytes};
  const cuuint32_t box[] = {64, 1, static_cast<cuuint32_t>(box_rows)};
  // Row kBlocksMapRows, the first out of the map, would be at the place itself.
  const uintptr_t begin = reinterpret_cast<uintptr_t>(blocks.data) - kBlocksMapRows * row_bytes;
  // NOLINTNEXTLINE(performance-no-int-to-ptr): an address in front of what it is of
  return encode_map(reinterpret_cast<void*>(begin), dims, strides, box);
}

CUtensorMap make_pairs_map(const DevicePairs& pairs, int box_rows) {
  require(pairs.num_columns % 8 == 0 && pairs.num_pairs % 8 == 0,
          "pairs of {} rows of {} values cannot be copied by tiles: both must be multiples of 8",
          pairs.num_pairs, pairs.num_columns);
  const auto row_bytes = static_cast<cuuint64_t>(pairs.num_columns * 2);
  const auto num_pairs = static_cast<cuuint64_t>(pairs.num_pairs);
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(pairs.num_columns), 8, 2, num_pairs / 8,
                             static_cast<cuuint64_t>(pairs.num_matrices)};
  const cuuint64_t strides[] = {row_bytes, num_pairs * row_bytes, 8 * row_bytes,
                                2 * num_pairs * row_bytes};
  const cuuint32_t box[] = {64, 8, 2, static_cast<cuuint32_t>(box_rows / 16), 1};
  return encode_map(const_cast<void*>(pairs.data), dims, strides, box);
}

}  // namespace tessera::cuda
