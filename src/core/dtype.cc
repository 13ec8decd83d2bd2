#include "core/dtype.h"

#include <array>

#include "core/error.h"

namespace tessera {
namespace {

struct DTypeInfo {
  DType dtype;
  std::string_view name;
  int64_t size = 0;
  bool is_storage = false;
  bool is_low_precision = false;
};

constexpr std::array kTypes = {
    DTypeInfo{.dtype = DType::kF32, .name = "f32", .size = 4, .is_storage = true},
    DTypeInfo{.dtype = DType::kBF16,
              .name = "bf16",
              .size = 2,
              .is_storage = true,
              .is_low_precision = true},
    DTypeInfo{.dtype = DType::kI32, .name = "i32", .size = 4},
    DTypeInfo{.dtype = DType::kI64, .name = "i64", .size = 8},
    DTypeInfo{.dtype = DType::kF64, .name = "f64", .size = 8},
    DTypeInfo{.dtype = DType::kU8, .name = "u8", .size = 1},
    DTypeInfo{.dtype = DType::kU16, .name = "u16", .size = 2},
    DTypeInfo{.dtype = DType::kF16, .name = "f16", .size = 2},
    DTypeInfo{.dtype = DType::kE4M3, .name = "e4m3", .size = 1},
    DTypeInfo{.dtype = DType::kE5M2, .name = "e5m2", .size = 1},
};

constexpr bool rows_are_in_order() {
  for (size_t i = 0; i < kTypes.size(); ++i) {
    if (kTypes[i].dtype != static_cast<DType>(i)) return false;
  }
  return true;
}
static_assert(rows_are_in_order(), "the table has a row for each type, in the order of DType");

const DTypeInfo& info_of(DType dtype) {
  const auto row = static_cast<size_t>(dtype);
  ensure(row < kTypes.size(), "unknown element type {}", row);
  return kTypes[row];
}

}  // namespace

int64_t dtype_size(DType dtype) {
  return info_of(dtype).size;
}

std::string_view dtype_name(DType dtype) {
  return info_of(dtype).name;
}

bool is_storage(DType dtype) {
  return info_of(dtype).is_storage;
}

bool is_factor(DType dtype) {
  return is_storage(dtype) || dtype == DType::kF16;
}

DType product_dtype(DType factor) {
  return factor == DType::kF16 ? DType::kF32 : factor;
}

bool is_low_precision(DType dtype) {
  return info_of(dtype).is_low_precision;
}

}  // namespace tessera
