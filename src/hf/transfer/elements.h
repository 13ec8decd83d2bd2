#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.h"

namespace tessera {

/// Whether elements can be converted: F32, BF16 and F16, in every direction.
bool is_float_storage(DType dtype);

/// Whether elements are whole numbers, which are converted from F32 and to it where that holds
/// them.
bool is_whole_storage(DType dtype);

/// Whether every value of `from` is a value of `to`.
bool is_exact(DType from, DType to);

/// Converts elements, which need not be aligned. Narrowing rounds to nearest even; NaN stays NaN.
/// Of equal types the bytes are copied. Throws UserError for whole numbers that F32 does not hold.
void convert_elements(const std::byte* from, DType from_type, std::byte* to, DType to_type,
                      int64_t count);

/// The same of elements each larger by `offset`, added in F32.
void add_offset(const std::byte* from, DType from_type, std::byte* to, DType to_type, int64_t count,
                float offset);

/// A dense matrix in memory, perhaps unaligned.
struct MatrixView {
  const std::byte* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  DType dtype = DType::kF32;
};

/// Writes columns [first, first + count) of a matrix as rows: `to` is [count, rows] of `to_type`.
void transpose_columns(const MatrixView& from, int64_t first, int64_t count, std::byte* to,
                       DType to_type);

/// Rows of two halves, whose elements stand in turn in `from`, with the halves one behind the
/// other. `cols` is even.
void split_alternating(const std::byte* from, int64_t rows, int64_t cols, DType dtype,
                       std::byte* to);
/// The way back.
void alternate_halves(const std::byte* from, int64_t rows, int64_t cols, DType dtype,
                      std::byte* to);

}  // namespace tessera
