#pragma once

#include <utility>

#include "core/tensor.h"

namespace tessera {

/// Whether activations and matrix weights may be stored as this type.
constexpr bool is_storage(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16;
}

/// Calls run(T{}) with the C++ type of a storage type: the one place where kernels turn the type of
/// their tensors into a template argument.
template <typename Run>
void with_storage(DType dtype, Run&& run) {
  ensure(is_storage(dtype), "a kernel for f32 and bf16 got {}", dtype_name(dtype));
  if (dtype == DType::kF32) {
    std::forward<Run>(run)(float{});
  } else {
    std::forward<Run>(run)(Bf16{});
  }
}

}  // namespace tessera
