#include "hf/transfer/elements.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "core/half.h"

namespace tessera {
namespace {

template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <typename From, typename To>
void convert(const std::byte* from, std::byte* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const To value(static_cast<float>(load<From>(from + i * int64_t{sizeof(From)})));
    std::memcpy(to + i * int64_t{sizeof(To)}, &value, sizeof(To));
  }
}

template <typename From>
void convert_to(const std::byte* from, std::byte* to, DType to_type, int64_t count) {
  if (to_type == DType::kF32) return convert<From, float>(from, to, count);
  if (to_type == DType::kBF16) return convert<From, Bf16>(from, to, count);
  return convert<From, Half>(from, to, count);
}

/// Tiles of both matrices stay in the first cache.
template <typename T>
void transpose(const MatrixView& from, int64_t first, int64_t count, std::byte* to) {
  constexpr int64_t kTile = 32;
  constexpr int64_t kSize = sizeof(T);
  for (int64_t row = 0; row < from.rows; row += kTile) {
    const int64_t row_end = std::min(row + kTile, from.rows);
    for (int64_t col = 0; col < count; col += kTile) {
      const int64_t col_end = std::min(col + kTile, count);
      for (int64_t c = col; c < col_end; ++c) {
        for (int64_t r = row; r < row_end; ++r) {
          std::memcpy(to + (c * from.rows + r) * kSize,
                      from.data + (r * from.cols + first + c) * kSize, kSize);
        }
      }
    }
  }
}

/// Calls copy(place in halves, place in turn), in bytes, for all elements of a row.
template <typename Copy>
void for_each_of_halves(int64_t rows, int64_t cols, int64_t size, Copy copy) {
  const int64_t half = cols / 2;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < cols; ++i)
      copy((row * cols + i) * size, (row * cols + i % half * 2 + i / half) * size);
  }
}

/// Between whole numbers and F32.
template <typename From, typename To>
void convert_exactly(const std::byte* from, std::byte* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const From value = load<From>(from + i * int64_t{sizeof(From)});
    constexpr From kMost = From{1 << 24};
    require(value >= -kMost && value <= kMost && static_cast<From>(static_cast<To>(value)) == value,
            "{} is no whole number that F32 holds", value);
    const To converted = static_cast<To>(value);
    std::memcpy(to + i * int64_t{sizeof(To)}, &converted, sizeof(To));
  }
}

void convert_whole(const std::byte* from, DType from_type, std::byte* to, DType to_type,
                   int64_t count) {
  ensure(from_type == DType::kF32 || to_type == DType::kF32, "convert_elements: {} to {}",
         dtype_name(from_type), dtype_name(to_type));
  if (from_type == DType::kI64) return convert_exactly<int64_t, float>(from, to, count);
  if (from_type == DType::kI32) return convert_exactly<int32_t, float>(from, to, count);
  if (to_type == DType::kI64) return convert_exactly<float, int64_t>(from, to, count);
  convert_exactly<float, int32_t>(from, to, count);
}

}  // namespace

bool is_float_storage(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

bool is_whole_storage(DType dtype) {
  return dtype == DType::kI64 || dtype == DType::kI32;
}

bool is_exact(DType from, DType to) {
  return from == to || to == DType::kF32;
}

void convert_elements(const std::byte* from, DType from_type, std::byte* to, DType to_type,
                      int64_t count) {
  const bool whole = is_whole_storage(from_type) || is_whole_storage(to_type);
  const bool known = is_float_storage(from_type) && is_float_storage(to_type);
  ensure(known || whole, "convert_elements: {} to {}", dtype_name(from_type), dtype_name(to_type));
  if (from_type == to_type) {
    if (count > 0) std::memcpy(to, from, count * dtype_size(to_type));
  } else if (whole) {
    convert_whole(from, from_type, to, to_type, count);
  } else if (from_type == DType::kF32) {
    convert_to<float>(from, to, to_type, count);
  } else if (from_type == DType::kBF16) {
    convert_to<Bf16>(from, to, to_type, count);
  } else {
    convert_to<Half>(from, to, to_type, count);
  }
}

void add_offset(const std::byte* from, DType from_type, std::byte* to, DType to_type, int64_t count,
                float offset) {
  std::vector<float> values(count);
  auto* const bytes = reinterpret_cast<std::byte*>(values.data());
  convert_elements(from, from_type, bytes, DType::kF32, count);
  for (float& value : values) value += offset;
  convert_elements(bytes, DType::kF32, to, to_type, count);
}

void split_alternating(const std::byte* from, int64_t rows, int64_t cols, DType dtype,
                       std::byte* to) {
  const int64_t size = dtype_size(dtype);
  for_each_of_halves(rows, cols, size, [&](int64_t halves, int64_t in_turn) {
    std::memcpy(to + halves, from + in_turn, size);
  });
}

void alternate_halves(const std::byte* from, int64_t rows, int64_t cols, DType dtype,
                      std::byte* to) {
  const int64_t size = dtype_size(dtype);
  for_each_of_halves(rows, cols, size, [&](int64_t halves, int64_t in_turn) {
    std::memcpy(to + in_turn, from + halves, size);
  });
}

void transpose_columns(const MatrixView& from, int64_t first, int64_t count, std::byte* to,
                       DType to_type) {
  const auto move = [&](std::byte* target) {
    if (dtype_size(from.dtype) == 4) {
      transpose<uint32_t>(from, first, count, target);
    } else {
      transpose<uint16_t>(from, first, count, target);
    }
  };
  if (from.dtype == to_type) return move(to);
  const int64_t num_elements = from.rows * count;
  std::vector<std::byte> buffer(num_elements * dtype_size(from.dtype));
  move(buffer.data());
  convert_elements(buffer.data(), from.dtype, to, to_type, num_elements);
}

}  // namespace tessera
