#include "core/dtype.h"

#include "core/error.h"

namespace tessera {

int64_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::kU8:
      return 1;
    case DType::kBF16:
    case DType::kU16:
    case DType::kF16:
      return 2;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kI64:
    case DType::kF64:
      return 8;
  }
  throw InternalError("dtype_size: unknown type");
}

std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kBF16:
      return "bf16";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
    case DType::kF64:
      return "f64";
    case DType::kU8:
      return "u8";
    case DType::kU16:
      return "u16";
    case DType::kF16:
      return "f16";
  }
  throw InternalError("dtype_name: unknown type");
}

}  // namespace tessera
