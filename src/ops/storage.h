#pragma once

#include <utility>

#include "core/tensor.h"

namespace tessera {

/// Calls run(T{}) with the C++ type of a storage type: the one place where kernels turn the type of
/// their tensors into a template argument.
template <typename Run>
void with_storage(DType dtype, Run&& run) {
  switch (dtype) {
    case DType::kF32:
      return std::forward<Run>(run)(float{});
    case DType::kBF16:
      return std::forward<Run>(run)(Bf16{});
    default:
      internal_error("kernels store no {}", dtype_name(dtype));
  }
}

}  // namespace tessera
